"""Any configuration file is used, or every problem is reported with its line, and no secret is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.config import ConfigError, hash_of, load, warnings_of
from tests import ROOT
from tests.fuzz.profile import FUZZED

EXAMPLE = (ROOT / "config.example.yaml").read_text()
SHOWN: dict[str, Any] = yaml.safe_load(EXAMPLE)
SHOWN["tenants"] = [{"name": "acme", "keys": [hash_of("k")], "limits": {"in_flight": 1}, "models": ["a"]}]
SECRET = "s3cret-that-nobody-may-see"
PLACES_OF_KEYS: list[tuple[str | int, ...]] = [
    ("api_keys",), ("api_keys", 0), ("backend_api_key",), ("admin_key",), ("backends", 0, "api_key"),
    ("tenants", 0, "keys"), ("tenants", 0, "keys", 0), ("tenants", 0, "keys", 0, "hash"), ("tenants", 0, "cache_salt"),
]  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=6), st.dates(),
    st.sampled_from(["loopback", "critical", "http://a", "header:x", "null", "1e400", ".inf", "\x85", "sha256:"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LEAVES, inner, max_size=3), max_leaves=6
)


def places(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place] * bool(place) + [found for key, one in inner for found in places(one, (*place, key))]


def put(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    """A copy of `value` with `new` at `place`. Missing containers on the path are made."""
    if not place:
        return new
    if isinstance(place[0], int):
        items = list(value) if isinstance(value, list) and value else [None]
        items[place[0]] = put(items[place[0]], place[1:], new)
        return items
    return (value if isinstance(value, dict) else {}) | {
        place[0]: put(value.get(place[0]) if isinstance(value, dict) else None, place[1:], new)
    }


def problems_of(path: Path, text: str | bytes) -> str:
    """All problems of a file that has this text."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        warnings_of(path, load(path))
    except ConfigError as error:
        assert error.problems
        assert all(problem.startswith(f"{path}:") for problem in error.problems)
        return "\n".join(error.problems)
    return ""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "any.yaml"


@FUZZED
@given(st.lists(st.tuples(st.sampled_from(places(SHOWN)), VALUES), min_size=1, max_size=3))
def test_any_value_is_accepted_or_reported(path: Path, edits: list[tuple[tuple[str | int, ...], Any]]) -> None:
    config: Any = SHOWN
    for place, value in edits:
        try:
            config = put(config, place, value)
        except IndexError:
            continue
    problems_of(path, yaml.safe_dump(config, allow_unicode=True))


@FUZZED
@given(
    st.sampled_from(PLACES_OF_KEYS),
    st.sampled_from(
        [
            SECRET,
            SECRET + "\n",
            [SECRET],
            [[SECRET]],
            {"a": SECRET},
            [{"b": SECRET}],
            {"hash": [SECRET]},
            f"sha256:{SECRET}",
        ]
    ),
    st.sampled_from([None, ("port",), ("tenants", 0, "name")]),
)
def test_secrets_in_the_place_of_keys_are_never_repeated(
    path: Path, place: tuple[str | int, ...], value: Any, broken: tuple[str | int, ...] | None
) -> None:
    config = put(SHOWN, place, value)
    if broken is not None:
        config = put(config, broken, [])
    assert SECRET not in problems_of(path, yaml.safe_dump(config))
    try:
        assert SECRET not in repr(load(path))
    except ConfigError as error:
        assert SECRET not in repr(error)


@FUZZED
@given(st.lists(st.tuples(st.integers(0, len(EXAMPLE)), st.integers(0, 40), st.binary(max_size=6)), max_size=4))
@example([(0, 0, b"\xef\xbb\xbf")])
@example([(0, 0, b"? [a]\n: 1\n")])
@example([(0, len(EXAMPLE), b"&a [*a]")])
def test_any_bytes_are_a_configuration_or_a_reported_problem(path: Path, cuts: list[tuple[int, int, bytes]]) -> None:
    text = EXAMPLE.encode()
    for at, gone, new in cuts:
        text = text[:at] + new + text[at + gone :]
    problems_of(path, text)
