from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llmproxy.backends import state_file
from llmproxy.backends.engine_config import SEQUENCES_MAX
from llmproxy.backends.state_file import (
    AGE_MAX_S,
    ENTRIES_MAX,
    FILE_BYTES_MAX,
    FORMAT,
    State,
    StateFile,
    log_old_file,
    state_path,
)
from llmproxy.core.domain import KnownCapacity, KnownLimit

ADDRESSES = (("0.0.0.0", 8080), ("0.0.0.0", 8081), ("127.0.0.1", 8080), ("::", 8080), ("/run/a.sock", 8080))
ONE = KnownLimit(8, True, ("tiny",), 4096)
OTHER = KnownLimit(40, False, ("large", "small"), None)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


class Limits:
    """The limits of a state file."""

    def __init__(self, file: StateFile) -> None:
        self.file = file

    def read(self) -> Mapping[str, KnownLimit]:
        return self.file.read().limits

    def write(self, known: Mapping[str, KnownLimit]) -> None:
        self.file.write(State(known))


def at(path: Path, clock: Clock | None = None) -> Limits:
    return Limits(StateFile(path, clock or Clock()))


def test_next_process_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way" / "state.json"
    assert at(path).read() == {}
    at(path).write({"http://a": ONE, "http://b": OTHER})
    assert at(path).read() == {"http://a": ONE, "http://b": OTHER}
    assert [one.name for one in path.parent.iterdir()] == ["state.json"]
    assert path.stat().st_mode & 0o077 == 0


def test_entries_of_other_proxies_stay(path: Path) -> None:
    at(path).write({"http://a": ONE})
    at(path).write({"http://b": OTHER})
    assert at(path).read() == {"http://a": ONE, "http://b": OTHER}


def test_entries_too_old_or_from_the_future_do_not_count(path: Path) -> None:
    clock = Clock()
    at(path, clock).write({"http://a": ONE})
    clock.now += AGE_MAX_S - 1
    assert at(path, clock).read() == {"http://a": ONE}
    at(path, clock).write({"http://b": OTHER})
    clock.now += 2
    assert at(path, clock).read() == {"http://b": OTHER}
    clock.now -= 3 * AGE_MAX_S
    assert at(path, clock).read() == {}


def test_file_is_bounded_and_keeps_the_newest_entries(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "ENTRIES_MAX", 10)
    clock = Clock()
    for number in range(12):
        clock.now += 1
        at(path, clock).write({f"http://{number}": ONE})
    assert set(at(path, clock).read()) == {f"http://{number}" for number in range(2, 12)}
    assert ENTRIES_MAX * 500 < FILE_BYTES_MAX


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b"port: 8080\nbackends: []\n",
        json.dumps({"format": "llmproxy-state/2", "limits": {}}).encode(),
        json.dumps({"format": FORMAT, "limits": {"http://a": {"limit": "many"}}}).encode(),
        b"x" * (FILE_BYTES_MAX + 2),
    ],
)
def test_a_file_that_is_not_its_own_is_reported_once_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    state = at(path)
    with capture_logs() as logs:
        assert state.read() == {}
        state.write({"http://a": ONE})
        state.write({"http://a": OTHER})
    assert [line["event"] for line in logs] == ["state_not_read"]
    assert logs[0]["log_level"] == "warning"
    assert path.read_bytes() == content


def test_an_empty_file_is_one_to_write_into(path: Path) -> None:
    path.touch()
    assert at(path).read() == {}
    at(path).write({"http://a": ONE})
    assert at(path).read() == {"http://a": ONE}


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, path = tmp_path / "state.json", tmp_path / "volume" / "kept.json"
    link.symlink_to(path)
    at(link).write({"http://a": ONE})
    assert link.is_symlink()
    assert at(path).read() == {"http://a": ONE}
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    at(loop).write({"http://a": ONE})
    assert at(loop).read() == {"http://a": ONE}


def test_path_that_is_no_file_is_reported_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with capture_logs() as logs:
        one = at(path)
        assert one.read() == {}
        one.write({"http://a": ONE})
    assert path.is_fifo()
    assert [(line["event"], line["why"]) for line in logs] == [
        ("state_not_read", "not a state file: it is no regular file")
    ]


def test_a_limit_that_no_engine_has_is_dropped(path: Path) -> None:
    at(path).write({"http://a": KnownLimit(SEQUENCES_MAX + 1, True, ("tiny",), 4096), "http://b": ONE})
    assert at(path).read() == {"http://b": ONE}


def test_concurrent_writers_lose_nothing(tmp_path: Path, path: Path) -> None:
    at(path).write({"http://a": ONE})
    busy = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(busy, fcntl.LOCK_EX)
    one = at(path)
    with capture_logs() as logs:
        one.write({"http://b": OTHER})
    assert at(path).read() == {"http://a": ONE}
    os.close(busy)
    one.write({"http://b": OTHER})
    assert at(path).read() == {"http://a": ONE, "http://b": OTHER}
    assert logs == []


def test_unwritable_path_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = at(tmp_path / "file" / "state.json")
    with capture_logs() as logs:
        assert state.read() == {}
        state.write({"http://a": ONE})
        state.write({"http://a": OTHER})
    assert len(logs) == 1


def test_a_write_that_fails_leaves_the_old_file_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(path).write({"http://a": ONE})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    at(path).write({"http://a": OTHER})
    monkeypatch.undo()
    assert at(path).read() == {"http://a": ONE}
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_written_while_nothing_is_new(path: Path) -> None:
    clock = Clock()
    state = at(path, clock)
    state.write({"http://a": ONE})
    path.unlink()
    state.write({"http://a": ONE})
    assert not path.exists()
    clock.now += state_file.REFRESH_S
    state.write({"http://a": ONE})
    assert path.exists()
    path.unlink()
    state.write({})
    assert not path.exists()


async def test_file_follows_the_learned_limits_and_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "CHECK_S", 0.0)
    path, known = tmp_path / "state.json", {"http://a": ONE}
    following = asyncio.create_task(at(path).file.follow(lambda: State(known)))
    while not path.exists():  # noqa: ASYNC110 - the file has no event of its own
        await asyncio.sleep(0)
    monkeypatch.setattr(state_file, "CHECK_S", 3_600.0)
    known["http://a"] = OTHER
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert at(path).read() == {"http://a": OTHER}


@pytest.mark.parametrize(
    ("setting", "environ", "path"),
    [
        ("none", {"HOME": "/h"}, None),
        ("/x/y.json", {"HOME": "/h", "STATE_DIRECTORY": "/s"}, "/x/y.json"),
        ("auto", {"HOME": "/h", "STATE_DIRECTORY": "/s:/t", "XDG_STATE_HOME": "/x"}, "/s/state-0.0.0.0-8080.json"),
        ("auto", {"HOME": "/h", "XDG_STATE_HOME": "/x"}, "/x/llmproxy/state-0.0.0.0-8080.json"),
        ("auto", {"HOME": "/h", "XDG_STATE_HOME": "x"}, "/h/.local/state/llmproxy/state-0.0.0.0-8080.json"),
        ("auto", {"HOME": "/h"}, "/h/.local/state/llmproxy/state-0.0.0.0-8080.json"),
        ("auto", {}, None),
    ],
)
def test_path_of_the_file(setting: str, environ: dict[str, str], path: str | None) -> None:
    assert state_path(setting, environ, "0.0.0.0", 8080) == (None if path is None else Path(path))


def test_each_address_has_a_file_of_its_own() -> None:
    places = {state_path("auto", {"HOME": "/h"}, host, port) for host, port in ADDRESSES}
    assert len(places) == len(ADDRESSES)
    assert {None if one is None else str(one.parent) for one in places} == {"/h/.local/state/llmproxy"}


def test_a_port_that_is_another_at_each_start_has_no_file() -> None:
    assert state_path("auto", {"HOME": "/h"}, "127.0.0.1", 0) is None
    assert state_path("/x/y.json", {}, "127.0.0.1", 0) == Path("/x/y.json")


def test_the_file_that_proxies_shared_is_not_read_and_that_is_logged(tmp_path: Path) -> None:
    own = state_path("auto", {"XDG_STATE_HOME": str(tmp_path)}, "127.0.0.1", 8080)
    assert own is not None
    with capture_logs() as logs:
        log_old_file(own)
    assert logs == []
    StateFile(own.with_name("state.json")).write(State({"http://a": ONE}))
    with capture_logs() as logs:
        log_old_file(own)
    assert [line["event"] for line in logs] == ["old_state_ignored"]
    assert StateFile(own).read() == State()


# --- capacities -------------------------------------------------------------------------------------------------------

LEARNED = KnownCapacity((1.0, 2.0), ((7, 40, 100.0, 0.5),), (12_000.0,))
MORE = KnownCapacity((3.0, 4.0), ((7, 50, 100.0, 0.5),))


def test_next_process_reads_capacities_of_all_processes(path: Path) -> None:
    at(path).write({"http://a": ONE})
    StateFile(path, Clock()).write(State({}, {"sim": LEARNED}))
    StateFile(path, Clock()).write(State({}, {"other": MORE}))
    assert StateFile(path, Clock()).read() == State({"http://a": ONE}, {"sim": LEARNED, "other": MORE})


def test_a_file_from_before_capacities_is_read(path: Path) -> None:
    at(path).write({"http://a": ONE})
    content = json.loads(path.read_bytes())
    del content["pools"]
    path.write_text(json.dumps(content))
    assert StateFile(path, Clock()).read() == State({"http://a": ONE}, {})


def test_capacities_are_a_reason_to_write_once_a_minute_and_at_the_end(path: Path) -> None:
    clock = Clock()
    file = StateFile(path, clock)
    file.write(State({}, {"sim": LEARNED}))
    file.write(State({}, {"sim": MORE}))
    assert file.read().capacities == {"sim": LEARNED}
    file.write(State({}, {"sim": MORE}), last=True)
    assert file.read().capacities == {"sim": MORE}
    clock.now += state_file.POOLS_EVERY_S
    file.write(State({}, {"sim": LEARNED}))
    assert file.read().capacities == {"sim": LEARNED}


def test_old_capacities_and_too_many_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "POOLS_MAX", 2)
    clock = Clock()
    for number in range(3):
        clock.now += 1
        StateFile(path, clock).write(State({}, {f"{number}": LEARNED}))
    assert set(StateFile(path, clock).read().capacities) == {"1", "2"}
    clock.now += AGE_MAX_S
    assert StateFile(path, clock).read().capacities == {}
