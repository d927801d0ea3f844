"""Problems of `shared_limits` are reported at their key, and never show the password of the store."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.config import ConfigError, changes_between, load, with_reloadable
from llmproxy.config.changes import read_at_start

STORE = "store: 'valkey://valkey:6379'"


def problem(write: Any, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    [found] = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("store: kubernetes", "shared_limits.store: should be valkey://HOST:PORT or valkeys://HOST:PORT with TLS"),
        ("store: 'valky://h'", '(nearest: "valkey://")'),
        ("store: 'http://h'", "shared_limits.store: should be valkey://HOST:PORT"),
        ("store: 'valkey://'", "shared_limits.store: should name a host"),
        ("store: 'valkey://h:70000'", "shared_limits.store: should name a host, and no port but a number"),
        (f"{STORE}, name: 'a}}b'", "shared_limits.name: "),
        (f"{STORE}, on_failure: open", "shared_limits.on_failure: 'open' should be closed, or 1/N"),
        (f"{STORE}, on_failure: 1/1", "shared_limits.on_failure: '1/1' should be closed, or 1/N"),
        (f"{STORE}, on_failure: 1/0", "shared_limits.on_failure: '1/0' should"),
        (f"{STORE}, on_failure: 2/3", "shared_limits.on_failure: '2/3' should"),
        (f"{STORE}, on_failure: 1/03", "shared_limits.on_failure: '1/03' should"),
        (f"{STORE}, on_failure: 0.5", "shared_limits.on_failure: "),
    ],
)
def test_problem_names_the_key(write: Any, text: str, message: str) -> None:
    assert message in problem(write, f"shared_limits: {{{text}}}")


def test_members_of_a_cluster_share_limits_already(write: Any) -> None:
    text = f"cluster: {{listen: '127.0.0.1:8090'}}\nshared_limits: {{{STORE}}}"
    assert ":2: shared_limits.store: has no effect beside cluster.listen" in problem(write, text)


@pytest.mark.parametrize(("on_failure", "proxies"), [("closed", None), ("1/2", 2), ("1/10", 10), ("1/999999", 999_999)])
def test_valid_values_are_read(write: Any, on_failure: str, proxies: int | None) -> None:
    assert load(write(f"shared_limits: {{{STORE}, on_failure: {on_failure}}}")).shared_limits.proxies == proxies


@pytest.mark.parametrize("url", ["valkey://:s3cret@h", "valky://:s3cret@h", "valkey://:s3cret@h:port", "s3cret"])
def test_a_password_is_never_repeated(write: Any, url: str) -> None:
    try:
        said = repr(load(write(f"shared_limits: {{store: '{url}'}}")))
    except ConfigError as error:
        said = str(error)
    assert "s3cret" not in said


def test_another_store_needs_a_restart_and_is_not_shown(write: Any) -> None:
    old = load(write("shared_limits: {store: 'valkey://:s3cret@h'}"))
    new = load(write("shared_limits: {store: 'valkey://:s3cret@other', on_failure: 1/2}"))
    changes = changes_between(old, new)
    assert [str(change) for change in changes] == [
        "shared_limits.store: changed, not shown",
        "shared_limits.on_failure: closed -> 1/2",
    ]
    assert all(read_at_start(change.key) for change in changes)
    assert with_reloadable(old, new) == old
