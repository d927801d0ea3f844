"""Null is accepted for each nullable key in files, flags and variables, and is an error elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
import yaml

from llmproxy.cli.flags import FLAGS, Flag, from_environment, from_flags
from llmproxy.config import (
    Config,
    ConfigError,
    Override,
    changes_between,
    hash_of,
    keys,
    load,
    settings_of,
    with_reloadable,
)
from llmproxy.config.keys import sections_in
from llmproxy.config.schema.section import Section, may_be_null

NULLABLE = [key for key, field in keys().items() if may_be_null(field)]
BY_FLAG = [flag for flag in FLAGS if flag.keys[0] in NULLABLE]
OTHER_THAN_NULL = {
    "admin_key": hash_of("k"),
    "discovery.kubernetes_api": "http://127.0.0.1:8001",
    "cluster.listen": "127.0.0.1:8090",
    "cluster.advertise": "10.0.0.7:8090",
    "cluster.lock": "valkey://127.0.0.1:6379",
    "queue.flow_bytes_max": "99999999",
}
"""Where the text 7 is no value."""
OPEN_WITHOUT_ENTRIES = {"api_keys", "tenants"}
NEEDED: dict[str, Any] = {"url": "https://a", "name": "n", "hash": hash_of("k"), "keys": [hash_of("k")]}


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def nested(key: str, value: object) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def entries() -> Iterator[tuple[str, type[Section], str]]:
    """Every nullable key of list entries, with the list."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            continue
        for section in sections_in(field.annotation):
            yield from ((name, section, key) for key, inner in section.model_fields.items() if may_be_null(inner))


def test_description_explains_null_of_each_nullable_key() -> None:
    assert {"health.hung_s", "health.slow_factor", "queue.tokens_max", "admin.port"} <= set(NULLABLE)
    for key in set(NULLABLE) - {"backend_api_key"}:
        assert "null" in (keys()[key].description or ""), key
    for key, field in keys().items():
        assert may_be_null(field) or "null" not in (field.description or ""), key


@pytest.mark.sampled(6)
@pytest.mark.parametrize("key", NULLABLE)
@pytest.mark.parametrize("word", ["null", "~", ""])
def test_null_in_the_file_is_null(write: Any, key: str, word: str) -> None:
    text = yaml.safe_dump(nested(key, "NULL")).replace("'NULL'", "NULL").replace("NULL", word)
    assert value_at(load(write(text)), key) is None


@pytest.mark.sampled(6)
@pytest.mark.parametrize("flag", BY_FLAG, ids=lambda flag: flag.name)
@pytest.mark.parametrize("word", ["null", "none", "None"])
def test_null_as_flag_or_variable_overrides_the_file(write: Any, flag: Flag, word: str) -> None:
    key = flag.keys[0]
    file = write(yaml.safe_dump(nested(key, OTHER_THAN_NULL.get(key, "7"))))
    assert value_at(load(file), key) is not None
    for given in (from_flags({flag.parameter: word}, ()), from_environment({flag.variable: word})):
        assert value_at(load(file, given), key) is None
        assert value_at(load(None, given), key) is None


@pytest.mark.parametrize(("name", "section", "key"), list(entries()))
def test_null_of_an_entry_of_a_list_is_null(name: str, section: type[Section], key: str) -> None:
    entry = {one: NEEDED[one] for one in section.model_fields if one in NEEDED} | {key: None}
    assert getattr(section.model_validate(entry), key) is None
    assert name in Config.model_fields


def test_null_reaches_the_core_and_a_reload() -> None:
    old, new = Config(), Config.model_validate({"health": {"hung_s": None, "slow_factor": None}})
    assert [str(change) for change in changes_between(old, new)] == [
        "health.hung_s: 1.5 -> null",
        "health.slow_factor: 5.0 -> null",
    ]
    assert [str(change) for change in changes_between(new, old)] == [
        "health.hung_s: null -> 1.5",
        "health.slow_factor: null -> 5.0",
    ]
    health = settings_of(with_reloadable(old, new)).health
    assert (health.hung_s, health.slow_factor) == (inf, inf)


@pytest.mark.parametrize("word", ["null", "none", "None", ""])
@pytest.mark.parametrize("key", ["state_file", "usage.dir"])
def test_null_is_the_word_none_of_a_file(write: Any, key: str, word: str) -> None:
    file = write(yaml.safe_dump(nested(key, "WORD")).replace("WORD", word))
    flag = next(flag for flag in FLAGS if flag.keys == (key,))
    assert value_at(load(file), key) == "none"
    assert not word or value_at(load(None, from_flags({flag.parameter: word}, ())), key) == "none"
    assert value_at(load(None, from_flags({flag.parameter: "x/null"}, ())), key) == "x/null"


@pytest.mark.parametrize("key", [key for key, field in Config.model_fields.items() if not may_be_null(field)])
def test_null_is_the_default_of_sections_and_an_error_elsewhere(write: Any, key: str) -> None:
    file = write(f"host: a\n{key}:\n" if key != "host" else "\nhost:\n")
    default = getattr(Config(), key)
    if key == "state_file":
        assert load(file).state_file == "none"
        return
    if isinstance(default, Section | tuple | dict) and key not in OPEN_WITHOUT_ENTRIES:
        assert getattr(load(file), key) == default
        return
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert caught.value.problems == (
        f"{file}:2: {key}: has no value, and may not be null: give it one, or leave it out",
    )


def test_only_an_explicit_empty_list_needs_no_key(write: Any) -> None:
    assert not load(write("api_keys: []\ntenants: []\n")).needs_key()


@pytest.mark.parametrize(
    "text",
    [
        "queue: {max_wait_s: null}",
        "scheduling: {weights: {m: }}",
        "backends: [{url: http://a, name: }]",
        "trust_headers: [null]",
        "models: [{name: }]",
        "tenants: [null]",
        "api_keys: [null]",
    ],
)
def test_null_is_never_ignored(write: Any, text: str) -> None:
    with pytest.raises(ConfigError):
        load(write(text))


def test_null_as_text_is_refused_where_null_is_no_value() -> None:
    with pytest.raises(
        ConfigError, match=r"^--queue-max-wait-s: queue\.max_wait_s: should be a valid number, not 'null'$"
    ):
        load(None, [Override("queue.max_wait_s", "null", "--queue-max-wait-s")])
