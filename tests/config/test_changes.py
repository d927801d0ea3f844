"""Differences between configurations, keys that need a restart, and changes of files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.config import (
    Config,
    ConfigError,
    Override,
    WatchedFile,
    changes,
    changes_between,
    hash_of,
    load,
    load_backends,
    with_reloadable,
)
from llmproxy.config.changes import NEEDS_RESTART, SECRET, in_force, origins_in_force
from llmproxy.config.keys import leaves, sections_in
from llmproxy.config.reload import Reloader, Reread
from llmproxy.config.schema.section import Section
from tests import ROOT


def config(**fields: Any) -> Config:
    return Config.model_validate(fields)


def message(old: Config, new: Config) -> list[str]:
    return [str(change) for change in changes_between(old, new)]


def test_equal_configurations_do_not_differ() -> None:
    entries: dict[str, Any] = {"backends": ["http://a"], "models": [{"name": "m"}], "bands": {"urgent": 50}}
    assert message(config(**entries), config(**entries)) == []


def test_entries_are_compared_by_name_in_any_order() -> None:
    old = config(backends=["http://a", {"url": "http://b", "max_in_flight": 2}, "http://c"])
    new = config(backends=[{"url": "http://b", "max_in_flight": 3}, "http://a", "http://d"])
    assert message(old, new) == [
        "backends[b].max_in_flight: 2 -> 3",
        "backends[c]: removed",
        "backends[d]: added {url: http://d, name: d, role: both, forward_priority: False, ask_usage: True,"
        " tls: {insecure_skip_verify: False}, external: {only_above_wait_s: 10.0, from_band: default}}",
    ]


def test_mapping_changes_by_key_and_list_as_a_whole() -> None:
    old = config(scheduling={"weights": {"a": 1.0, "b": 2.0}}, bands={"urgent": 50})
    new = config(scheduling={"weights": {"a": 3.0}}, trust_headers="none")
    assert message(old, new) == [
        "trust_headers: auto -> []",
        "bands.urgent: removed",
        "scheduling.weights.a: 1.0 -> 3.0",
        "scheduling.weights.b: removed",
    ]


def test_changes_show_no_key_and_no_hash() -> None:
    secrets = [hash_of("k1"), hash_of("k2"), "plain-1", "plain-2", "engine-1", "engine-2", hash_of("a1")]
    secrets += ["salt-of-sixteen-or-more-1", "salt-of-sixteen-or-more-2"]
    old = config(api_keys=["plain-1"], backend_api_key="engine-1")
    new = config(
        api_keys=["plain-2"],
        admin_key=hash_of("a1"),
        backends=[{"url": "http://a", "api_key": "engine-2"}],
        tenants=[{"name": "t", "keys": [hash_of("k1")], "cache_salt": secrets[-2]}],
    )
    key = {"hash": hash_of("k2"), "expires": "2030-01-01"}
    other = config(tenants=[{"name": "t", "keys": [key], "cache_salt": secrets[-1]}])
    text = "\n".join(message(old, new) + message(new, old) + message(new, other))
    assert "api_keys: changed, not shown" in text
    assert "tenants[t].keys: changed, not shown" in text
    assert "tenants[t].cache_salt: changed, not shown" in text
    for secret in secrets:
        assert secret not in text


@pytest.mark.parametrize(
    "keys",
    [["good"], ["new", "good"], [{"hash": hash_of("old"), "expires": "2030-01-01"}, "good"], ["good", "old"]],
    ids=["revoked", "replaced", "expires", "other-order"],
)
def test_a_change_of_keys_without_names_is_a_change(keys: list[Any]) -> None:
    def tenant(keys: list[Any]) -> Config:
        hashes = [key if isinstance(key, dict) else hash_of(key) for key in keys]
        return config(tenants=[{"name": "t", "keys": hashes}])

    assert message(tenant(["old", "good"]), tenant(keys)) == ["tenants[t].keys: changed, not shown"]
    assert [one.key for one in in_force(tenant(keys)) if one.key.endswith(".hash")] == [
        f"tenants[t].keys[{i}].hash" for i in range(len(keys))
    ]


def test_values_hidden_by_the_schema_are_hidden_in_changes() -> None:
    sections: list[type[Section]] = [Config]
    for section in sections:
        for name, field in section.model_fields.items():
            assert field.repr or name in SECRET, name
            sections += sections_in(field.annotation)
    assert {section.__name__ for section in sections} >= {"BackendConfig", "TenantConfig"}


def test_reload_keeps_the_values_that_need_a_restart() -> None:
    old = config(port=1, scheduling={"placement": "session", "weights": {"a": 1.0}}, queue={"max_wait_s": 1.0})
    new = config(port=2, scheduling={"placement": "cost", "weights": {"a": 2.0}}, queue={"max_wait_s": 2.0})
    merged = with_reloadable(old, new)
    assert (merged.port, merged.scheduling.placement) == (1, "session")
    assert (merged.scheduling.weights, merged.queue.max_wait_s) == ({"a": 2.0}, 2.0)
    assert {key.partition(":")[0] for key in message(merged, new)} == {"port", "scheduling.placement"}


def test_a_value_that_needs_a_restart_keeps_its_origin() -> None:
    old = config(port=1).with_origins({("port",): "flag"})
    new = config(port=2, workers=2, queue={"max_wait_s": 2.0}).with_origins(
        {("port",): "file:1", ("workers",): "file:2", ("queue",): "file:3"}
    )
    for _ in range(2):
        old = with_reloadable(old, new).with_origins(origins_in_force(old, new))
        shown = {one.key: (one.value, one.origin) for one in in_force(old)}
        assert shown["port"] == ("1", "flag")
        assert shown["workers"] == ("1", "default")
        assert shown["queue.max_wait_s"] == ("2.0", "file:3")
    assert new.origins["port",] == "file:1"


async def test_a_reload_compares_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def noted(value: Any) -> str:
        threads.add(get_ident())
        return str(value)

    monkeypatch.setattr(changes, "value_text", noted)
    new = config(port=2, queue={"max_wait_s": 2.0})
    applied: list[Config] = []
    reloader = Reloader(
        config(port=1), Reread(WatchedFile(tmp_path / "c.yaml"), lambda: new), applied.append, lambda _: None
    )
    await reloader.reload("test")
    assert applied == [config(port=1, queue={"max_wait_s": 2.0})]
    assert threads
    assert get_ident() not in threads


@pytest.mark.parametrize("left", [{}, {"tenants": [{"name": "t", "keys": [hash_of("k")]}]}], ids=["none", "tenants"])
async def test_a_reload_warns_when_no_key_is_needed_any_more(tmp_path: Path, left: dict[str, Any]) -> None:
    read = Reread(WatchedFile(tmp_path / "c.yaml"), lambda: config(**left))
    reloader = Reloader(config(api_keys=["k"]), read, lambda _: None, lambda _: None)
    with capture_logs() as lines:
        await reloader.reload("test")
        await reloader.reload("test")
    warned = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert warned == ([] if left else ["no_key_needed"])


def test_tenants_add_no_work_to_the_origins_of_values_that_need_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def noted(value: Any) -> str:
        shown.append(str(value))
        return shown[-1]

    monkeypatch.setattr(changes, "value_text", noted)
    works = []
    for tenants in (0, 9):
        many = config(tenants=[{"name": f"t{i}", "keys": [hash_of(f"k{i}")]} for i in range(tenants)])
        origins_in_force(many, many)
        works.append(len(shown))
        shown.clear()
    assert works[0] == works[1] > 0


def test_only_written_values_come_from_a_file_or_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "llmproxy.yaml"
    file.write_text("queue: {requests_max: 9}\nscheduling:\n  initial_batch_limit: 4\nbackends: [http://a]\n")
    first = load(file, [Override("backends", ["http://b"], "--backend")])
    again = load(file, [Override("backends", ["http://b"], "--backend")])
    for now in (first, with_reloadable(first, again).with_origins(origins_in_force(first, again))):
        origin = {one.key: one.origin for one in in_force(now)}
        assert origin["queue.requests_max"] == f"{file}:1"
        assert origin["scheduling.initial_batch_limit"] == f"{file}:3"
        assert origin["backends[b].url"] == "--backend"
        of_files = {key for key, source in origin.items() if source.startswith(str(file))}
        assert of_files == {"queue.requests_max", "scheduling.initial_batch_limit"}
        assert {key for key, source in origin.items() if source == "--backend"} == {"backends[b].url"}


def test_every_key_that_needs_a_restart_is_one() -> None:
    known = set(leaves(Config))
    assert known | {key.partition(".")[0] for key in known} >= NEEDS_RESTART


def test_the_page_marks_keys_that_need_a_restart() -> None:
    page = (ROOT / "docs/how-to/configure.md").read_text()
    named = set(re.findall(r"`([\w.]+)`", page.partition("## What needs a restart")[2]))
    assert {key.removeprefix("scheduling.") for key in NEEDS_RESTART if not key.startswith("clients.")} <= {
        key.removeprefix("scheduling.") for key in named
    }


# --- a file of backends -----------------------------------------------------------------------------------------------


def test_backends_file_is_read_as_the_section_backends(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text('{"backends": ["http://a", {"url": "http://b", "name": "b", "max_in_flight": 3}]}')
    assert [(one.name, one.max_in_flight) for one in load_backends(file)] == [("a", None), ("b", 3)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("backends:\n- {url: http://a, max_in_fligt: 3}\n", ":2: backends[0].max_in_fligt: is not a known key"),
        ("backends: [http://a, http://a]\n", ":1: backends[1].url: "),
        ("backends: [dns+http://a:1]\n", "such backends belong in the configuration itself"),
        ("- http://a\n", "should be lines of the form"),
        ("{}", "backends: is missing"),
    ],
)  # fmt: skip
def test_problem_of_a_backends_file_has_its_line(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "b.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_backends(file)
    assert problem in str(error.value)


# --- when a file has changed ------------------------------------------------------------------------------------------


def put(file: Path, text: str, mtime_s: int) -> None:
    file.write_text(text)
    os.utime(file, (mtime_s, mtime_s))


def taken(file: Path) -> WatchedFile:
    watched = WatchedFile(file)
    watched.take()
    return watched


@pytest.fixture
def file(tmp_path: Path) -> Path:
    put(tmp_path / "c.yaml", "a", 1)
    return tmp_path / "c.yaml"


def test_change_counts_once_and_only_when_complete(file: Path) -> None:
    watched = taken(file)
    assert not watched.has_changed()
    put(file, "", 2)
    assert not watched.has_changed()
    put(file, "all of it", 3)
    assert [watched.has_changed() for _ in range(3)] == [False, True, False]


def test_file_that_could_not_be_used_counts_again_once_complete(file: Path) -> None:
    watched = taken(file)
    watched.forget()
    put(file, "b", 2)
    assert [watched.has_changed() for _ in range(3)] == [False, True, False]
    watched.forget()
    assert [watched.has_changed() for _ in range(2)] == [True, False]


def test_file_missing_for_a_moment_has_not_changed(file: Path, tmp_path: Path) -> None:
    watched = taken(file)
    file.rename(tmp_path / "aside")
    assert [watched.has_changed() for _ in range(2)] == [False, False]
    (tmp_path / "aside").rename(file)
    assert [watched.has_changed() for _ in range(2)] == [False, False]


def test_pipe_does_not_change(tmp_path: Path) -> None:
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    watched = taken(pipe)
    os.utime(pipe, ns=(1, 1))
    assert [watched.has_changed() for _ in range(2)] == [False, False]


def test_changed_link_is_a_change(tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(tmp_path / name, "same", 1)
    link = tmp_path / "c.yaml"
    link.symlink_to("one")
    watched = taken(link)
    link.unlink()
    link.symlink_to("two")
    assert [watched.has_changed() for _ in range(2)] == [False, True]


def test_file_read_meanwhile_has_not_changed(file: Path) -> None:
    watched = taken(file)
    put(file, "b", 2)
    watched.take()
    assert [watched.has_changed() for _ in range(2)] == [False, False]
