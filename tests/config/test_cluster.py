"""Problems of `cluster` are reported at their key, and never show the password of the lock."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from llmproxy.config import ConfigError, load
from llmproxy.remote.cluster.network import reachable

LOCAL = "listen: '127.0.0.1:8090'"


def problem(write: Any, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(f"cluster: {{{text}}}"))
    [found] = caught.value.problems
    return found.partition(":1: ")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen: '8090'", "cluster.listen: '8090' is no HOST:PORT"),
        ("listen: ':8090'", "cluster.listen: ':8090' is no HOST:PORT"),
        ("listen: '127.0.0.1:http'", "cluster.listen: '127.0.0.1:http' is no HOST:PORT"),
        ("listen: '127.0.0.1:65536'", "cluster.listen: '127.0.0.1:65536' is no HOST:PORT"),
        ("listen: '::1:8090'", "cluster.listen: '::1:8090' is no HOST:PORT"),
        (f"{LOCAL}, advertise: gpu-0", "cluster.advertise: 'gpu-0' is no HOST:PORT"),
        ("listen: '0.0.0.0:8090'", "cluster.listen: members need tls.cert and tls.ca, or plaintext: true"),
        ("listen: '[::]:8090'", "cluster.listen: members need tls.cert"),
        ("listen: 'localhost.example:8090'", "cluster.listen: members need tls.cert"),
        ("listen: '127.example.com:8090'", "cluster.listen: members need tls.cert"),
        ("listen: '0.0.0.0:8090', tls: {cert: a}", "cluster.tls.ca: is missing"),
        (f"{LOCAL}, tls: {{ca: a}}", "cluster.tls.cert: is missing"),
        (f"{LOCAL}, tls: {{key: a}}", "cluster.tls.cert: is missing"),
        (f"{LOCAL}, lock_s: 0.5", "cluster.lock_s: should be greater than or equal to 1"),
        (f"{LOCAL}, name: 'A b'", "cluster.name: "),
        (f"{LOCAL}, lock: kubernets", 'cluster.lock: should be kubernetes, valkey://HOST:PORT, or valkeys://HOST:PORT '
         'with TLS (nearest: "kubernetes")'),
        (f"{LOCAL}, lock: 'redsi://h'", '(nearest: "redis://")'),
        (f"{LOCAL}, lock: 'valky://h'", '(nearest: "valkey://")'),
        (f"{LOCAL}, lock: 'valkey://'", "cluster.lock: should name a host"),
        (f"{LOCAL}, lock: 'valkey://h:port'", "cluster.lock: should name a host, and no port but a number"),
        (f"{LOCAL}, lock: 'valkey://h:70000'", "cluster.lock: should name a host, and no port but a number"),
    ],
)  # fmt: skip
def test_problem_names_the_key(write: Any, text: str, message: str) -> None:
    assert message in problem(write, text)


@pytest.mark.parametrize(
    "text",
    [
        LOCAL, "listen: '127.0.0.2:0'", "listen: '[::1]:8090'", "listen: 'localhost:8090'", "listen: null",
        "listen: '0.0.0.0:8090', plaintext: true", "listen: '0.0.0.0:8090', tls: {cert: a, ca: b}",
        f"{LOCAL}, lock: 'valkeys://u:p@h:1/2'", f"{LOCAL}, lock: 'redis://h'", f"{LOCAL}, lock: 'rediss://[::1]:6379'",
        f"{LOCAL}, lock: kubernetes",
    ],
)  # fmt: skip
def test_valid_values_are_read(write: Any, text: str) -> None:
    assert load(write(f"cluster: {{{text}}}")).cluster.lock_s == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("lock", ["valkey://:s3cret@h", "valky://:s3cret@h", "valkey://:s3cret@h:port", "s3cret"])
def test_a_password_is_never_repeated(write: Any, lock: str) -> None:
    path = write(f"cluster: {{{LOCAL}, lock: '{lock}'}}")
    try:
        said = repr(load(path))
    except ConfigError as error:
        said = str(error)
    assert "s3cret" not in said
    checked = subprocess.run(
        [sys.executable, "-m", "llmproxy", "check", str(path)], capture_output=True, text=True, check=False
    )
    assert checked.stdout + checked.stderr
    assert "s3cret" not in checked.stdout + checked.stderr


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "own", "address"),
    [
        ("10.0.0.7", "", "10.0.0.7:80"),
        ("::1", "", "[::1]:80"),
        ("0.0.0.0", "10.0.0.9", "10.0.0.9:80"),
        ("::", "10.0.0.9", "10.0.0.9:80"),
    ],
)
def test_members_are_reached_where_they_listen(
    monkeypatch: pytest.MonkeyPatch, host: str, own: str, address: str
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda _: own)
    assert reachable(host, 80) == address


@pytest.mark.parametrize("own", ["127.0.1.1", None])
def test_an_unreachable_address_is_a_problem(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    def resolve(_: str) -> str:
        if own is None:
            raise OSError
        return own

    monkeypatch.setattr("socket.gethostbyname", resolve)
    with pytest.raises(ConfigError) as caught:
        reachable("0.0.0.0", 80)
    assert str(caught.value).startswith("cluster.advertise: ")
