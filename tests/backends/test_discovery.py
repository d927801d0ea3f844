"""Backends found in DNS: names that stay, answers that are not believed at once, and failures that change nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trustme
from structlog.testing import capture_logs

from llmproxy.backends import discovery
from llmproxy.backends.discovery import Address, Discovery, DnsSource, addresses, check
from llmproxy.backends.events import BackendObserver
from llmproxy.backends.poller import Poller
from llmproxy.backends.registry import BackendRegistry
from llmproxy.backends.source import BACKENDS_MAX, SourceFailedError
from llmproxy.config import BackendConfig, BackendTlsConfig, Config, ConfigError, PollConfig, load_backends
from llmproxy.core.domain import Verdict
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.resolver import Resolver
from tests.core.make import pools, request

Answer = list[Address] | Exception


class Names:
    """A resolver with the given answers."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[Address] = []

    async def __call__(self, host: str, port: int) -> list[Address]:
        self.asked.append((host, port))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def source(
    names: Names, url: str = "dns+http://vllm.svc:8000", misses_before_removal: int = 2, **given: Any
) -> DnsSource:
    return DnsSource(BackendConfig(url=url, **given), 1.0, misses_before_removal, names)


async def names_of(one: DnsSource) -> list[str]:
    return [backend.name for backend in await one.query()]


A, B = ("127.0.0.8", 1), ("127.0.0.9", 1)


async def test_every_address_is_a_backend_of_its_own_configured_alike() -> None:
    names = Names([B, A, A, ("fd00::1", 8000)])
    found = await source(names, max_in_flight=4, api_key="k", role="decode").query()
    assert names.asked == [("vllm.svc", 8000)]
    assert [(one.name, one.url) for one in found] == [
        ("127.0.0.8:1", "http://127.0.0.8:1"),
        ("127.0.0.9:1", "http://127.0.0.9:1"),
        ("[fd00::1]:8000", "http://[fd00::1]:8000"),
    ]
    assert {(one.max_in_flight, one.api_key, one.role) for one in found} == {(4, "k", "decode")}


async def test_services_bring_their_own_ports_and_keep_https() -> None:
    names = Names([("a.svc", 8443), ("b.svc", 9443)])
    found = await source(names, "srv+https://_vllm._tcp.svc").query()
    assert names.asked[0][0] == "_vllm._tcp.svc"
    assert [one.url for one in found] == ["https://a.svc:8443", "https://b.svc:9443"]


async def test_a_record_that_is_no_address_is_left_out_and_no_other_one() -> None:
    names = Names([("a.svc", 8443), ("", 80), ("exa mple", 80), ("b\x1b[31m.svc", 80), ("c.svc", 0), ("d/x?", 80)])
    one = source(names, "srv+https://_vllm._tcp.svc")
    with capture_logs() as lines:
        assert await names_of(one) == ["a.svc:8443"]
        assert await names_of(one) == ["a.svc:8443"]
    assert sorted(line["why"] for line in lines) == [
        "'' is no address", "'b\\x1b[31m.svc' is no address", "'d/x?' is no address", "'exa mple' is no address",
        "0 is no port",
    ]  # fmt: skip


async def test_an_address_is_gone_when_several_answers_in_a_row_lack_it() -> None:
    one = source(Names([A, B], [A], [A, B], [A], [A], [A]))
    both, alone = ["127.0.0.8:1", "127.0.0.9:1"], ["127.0.0.8:1"]
    assert [await names_of(one) for _ in range(6)] == [both, both, both, both, alone, alone]


async def test_an_empty_answer_is_believed_four_times_as_late() -> None:
    one = source(Names([A], []))
    seen = [await names_of(one) for _ in range(9)]
    assert [len(names) for names in seen] == [1] * 8 + [0]


async def test_a_failure_counts_as_no_answer() -> None:
    one = source(Names([A, B], [A], SourceFailedError("no"), SourceFailedError("no"), [A, B], [A], [A]))
    assert len(await names_of(one)) == 2
    assert len(await names_of(one)) == 2
    for _ in range(2):
        with pytest.raises(SourceFailedError):
            await one.query()
    assert [len(await names_of(one)) for _ in range(3)] == [2, 2, 1]


async def test_more_addresses_than_anybody_has_are_refused() -> None:
    many = [(f"10.1.{i // 250}.{i % 250}", 80) for i in range(BACKENDS_MAX + 1)]
    with pytest.raises(SourceFailedError, match="1024 are the most"):
        await source(Names(many)).query()


async def test_a_resolver_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_UP_TIMEOUT_S", 0.01)

    async def never(_: str, __: int) -> list[Address]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(SourceFailedError, match="no answer about vllm"):
        await DnsSource(BackendConfig(url="dns+http://vllm.svc:8000"), 1.0, 2, never).query()


async def test_the_systems_resolver_knows_this_machine() -> None:
    assert ("127.0.0.1", 80) in await addresses(Resolver(), "127.0.0.1", 80)


@pytest.mark.parametrize(("number", "fails"), [(socket.EAI_NONAME, False), (socket.EAI_AGAIN, True)])
async def test_a_name_that_does_not_exist_is_an_empty_answer_and_no_failure(number: int, fails: bool) -> None:
    async def look_up(_: str) -> Any:
        raise socket.gaierror(number, "no such name")

    names = Resolver(look_up)
    if fails:
        with pytest.raises(SourceFailedError, match="no such name"):
            await addresses(names, "vllm.svc", 80)
    else:
        assert await addresses(names, "vllm.svc", 80) == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("dns+https://a:1", "most certificates have only names"),
        ("srv+http://_a._tcp.b:80", "should hold no port"),
        ("udp+http://a", "should start with http"),
    ],
)
def test_names_that_cannot_be_looked_up_are_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BackendConfig(url=url)


def test_service_records_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"backends": ["http://a", "srv+http://_a._tcp.b"]})
    monkeypatch.setattr(discovery, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"srv\+http://_a._tcp.b: .*pip install 'llmproxy-lb\[srv\]'"):
        check(config)
    monkeypatch.setattr(discovery, "find_spec", lambda _: object())
    check(config)


# --- effects on the registry -----------------------------------------------------------------------------------


@pytest.fixture
def endpoints() -> Endpoints:
    return Endpoints()


@pytest.fixture
async def registry(endpoints: Endpoints) -> AsyncIterator[BackendRegistry]:
    async with HttpUpstream(endpoints) as upstream:
        # Nobody listens behind these names; the polls find nothing, and nobody hears of it.
        one = BackendRegistry(Dispatcher(pools({})), upstream, BackendObserver(), PollConfig(), None, endpoints)
        yield one
        await one.close()
        await endpoints.close()


def known(registry: BackendRegistry) -> dict[str, tuple[str, str]]:
    return {one.name: (one.source, one.url) for one in registry.statuses()}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0)


async def test_a_poller_learns_whether_its_backend_has_work(
    registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Callable[[], bool]] = []

    class Watched(Poller):
        def __init__(self, *given: Any, **named: Any) -> None:
            asked.append(named["has_work"])
            super().__init__(*given, **named)

    monkeypatch.setattr("llmproxy.backends.registry.Poller", Watched)
    registry.update("config", [BackendConfig(name=name, url=f"http://127.0.0.1:{name}") for name in "12"])
    backend = registry._pools.backends["1"]
    backend.book(7, request(), 0.0)
    assert [one() for one in asked] == [True, False]
    backend.release(7, Verdict.SERVED, 1.0)
    assert [one() for one in asked] == [False, False]


async def test_a_backend_of_two_sources_stays_while_either_wants_it(registry: BackendRegistry) -> None:
    one, same_url, same_name = (
        BackendConfig(name="a", url="http://127.0.0.1:1"),
        BackendConfig(name="b", url="http://127.0.0.1:1"),
        BackendConfig(name="a", url="http://127.0.0.1:2"),
    )
    registry.update("config", [one])
    registry.update("file", [same_url, same_name])
    assert known(registry) == {"a": ("config", "http://127.0.0.1:1")}
    registry.update("config", [])
    await until(lambda: known(registry).keys() == {"a", "b"})
    assert known(registry) == {"a": ("file", "http://127.0.0.1:2"), "b": ("file", "http://127.0.0.1:1")}
    registry.remove_source("file")
    await until(lambda: not known(registry))
    assert not registry.backends
    assert not registry.pollers


async def test_trust_follows_the_backend_that_is_wanted_at_a_url(
    registry: BackendRegistry, endpoints: Endpoints
) -> None:
    def at(name: str, url: str, server_name: str) -> BackendConfig:
        return BackendConfig(name=name, url=url, tls=BackendTlsConfig(server_name=server_name))

    def trusted() -> dict[str, str | None]:
        return {url: peer.server_name for url, peer in endpoints.tls.items()}

    def end(name: str, lease: int) -> None:
        registry._pools.backends[name].release(lease, Verdict.SERVED, 1.0)
        if (emptied := registry._dispatcher._emptied.pop(name, None)) is not None:
            emptied.set()

    one, two = "https://127.0.0.1:1", "https://127.0.0.1:2"
    registry.update("config", [at("a", one, "a"), at("b", two, "b")])
    registry.update("config", [at("a", two, "a"), at("b", one, "b")])
    assert trusted() == {one: "b", two: "a"}
    # It still works for somebody while another takes its place, and comes back.
    registry._pools.backends["b"].book(7, request(), 0.0)
    registry.update("config", [at("c", one, "c"), at("d", two, "d")])
    await until(lambda: known(registry).keys() == {"b", "c", "d"})
    assert trusted() == {one: "c", two: "d"}
    registry._pools.backends["c"].book(8, request(), 0.0)
    registry.update("config", [at("b", one, "b")])
    await until(lambda: known(registry).keys() == {"b", "c"})
    assert trusted() == {one: "b"}
    end("c", 8)
    await until(lambda: known(registry).keys() == {"b"})
    assert trusted() == {one: "b"}
    end("b", 7)
    registry.update("config", [])
    await until(lambda: not known(registry))
    assert not endpoints.tls


async def test_authorities_are_not_read_again_where_a_source_says_the_same(
    registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr("llmproxy.backends.registry.peers_tls", lambda backends: read.extend(b.name for b in backends))
    for _ in range(3):
        registry.update("dns", [BackendConfig(name="a", url="https://127.0.0.1:1")])
    assert read == ["a"]


async def test_backends_with_equal_trust_share_one_context(
    registry: BackendRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path | None] = []
    create = ssl.create_default_context

    def counted(cafile: Path | None) -> ssl.SSLContext:
        made.append(cafile)
        return create(cafile=cafile)

    def pods(n: int, **tls: Any) -> list[BackendConfig]:
        trust = BackendTlsConfig(ca=ca, **tls)
        return [BackendConfig(name=f"{port}", url=f"https://127.0.0.1:{port}", tls=trust) for port in range(1, n + 1)]

    monkeypatch.setattr("llmproxy.upstream.tls.ssl.create_default_context", counted)
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    registry.update("pods", pods(8))
    registry.update("pods", pods(9))
    assert made == [ca]
    registry.update("pods", pods(9, server_name="engine"))
    assert made == [ca] * 2
    trustme.CA(key_type=trustme.KeyType.RSA).cert_pem.write_to_path(str(ca))
    registry.update("pods", pods(12))
    assert made == [ca] * 3


async def test_a_drain_outlives_updates_and_ends_with_the_backend(registry: BackendRegistry) -> None:
    one = BackendConfig(name="a", url="http://127.0.0.1:1")
    registry.update("config", [one])
    registry.drain("a")
    registry.update("config", [one.model_copy(update={"max_in_flight": 3})])
    assert registry.status("a").state == "drained"
    registry.update("config", [])
    await until(lambda: not known(registry))
    registry.update("config", [one])
    assert registry.status("a").state == "down"
    with pytest.raises(KeyError):
        registry.drain("b")


async def test_a_backend_drained_in_the_predecessor_joins_drained_once(registry: BackendRegistry) -> None:
    one = BackendConfig(name="a", url="http://127.0.0.1:1")
    registry.drain_on_join(["a", "never"])
    assert registry.drained() == {"a", "never"}
    registry.update("config", [one])
    assert registry.status("a").state == "drained"
    assert registry.drained() == {"a", "never"}
    registry.undrain("a")
    assert registry.drained() == {"never"}
    registry.update("config", [])
    await until(lambda: not known(registry))
    registry.update("config", [one])
    assert registry.status("a").state == "down"


async def test_a_drain_that_ends_before_the_backend_joins_is_forgotten(registry: BackendRegistry) -> None:
    registry.drain_on_join(["a"])
    registry.drain_on_join([])
    assert registry.drained() == set()
    registry.update("config", [BackendConfig(name="a", url="http://127.0.0.1:1")])
    assert registry.status("a").state == "down"


async def test_changed_sources_are_asked_again_and_removed_ones_leave(registry: BackendRegistry) -> None:
    expected: list[Collection[str]] = []
    looks: list[tuple[str, bool]] = []
    names = Names([A])
    found = Discovery(registry, expected.append, lambda name, ok: looks.append((name, ok)), (names, names))

    def config(**given: Any) -> Config:
        return Config.model_validate({"backends": [{"url": "dns+http://vllm.svc:8000", **given}]})

    found.reconfigure(config())
    assert expected == [{"dns+http://vllm.svc:8000"}]
    await until(lambda: looks)
    assert not expected[-1]
    assert known(registry) == {"127.0.0.8:1": ("dns+http://vllm.svc:8000", "http://127.0.0.8:1")}
    found.reconfigure(config())
    assert looks == [("dns+http://vllm.svc:8000", True)]
    found.reconfigure(config(max_in_flight=7))
    await until(lambda: len(looks) == 2)
    assert registry.backends["127.0.0.8:1"].max_in_flight == 7
    found.reconfigure(Config())
    await until(lambda: not known(registry))
    await found.close()


async def test_a_source_without_backends_is_logged_once(registry: BackendRegistry) -> None:
    looks: list[str] = []
    names = Names([], [], [A], [A], [])
    found = Discovery(registry, lambda _: None, lambda name, _: looks.append(name), (names, names))
    where = {
        "backends": ["dns+http://vllm.svc:8000"],
        "discovery": {"dns_interval_s": 0.01, "misses_before_removal": 1},
    }
    with capture_logs() as logs:
        found.reconfigure(Config.model_validate(where))
        await until(lambda: len(looks) >= 12)
        await found.close()
    events = [line["event"] for line in logs if line["event"] in ("discovery_found_nothing", "backend_added")]
    assert events == ["discovery_found_nothing", "backend_added", "discovery_found_nothing"]


async def test_a_bug_in_a_source_is_a_failure_that_changes_nothing(
    registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmproxy.backends.discovery.asyncio.sleep", lambda _: real_sleep(0))
    looks: list[bool] = []
    names = Names([A], RuntimeError("bug"), RuntimeError("bug"), [A, B])
    found = Discovery(registry, lambda _: None, lambda _, ok: looks.append(ok), (names, names))
    found.reconfigure(Config.model_validate({"backends": ["dns+http://vllm.svc:8000"]}))
    await until(lambda: len(looks) >= 4)
    assert looks[:4] == [True, False, False, True]
    assert known(registry).keys() == {"127.0.0.8:1", "127.0.0.9:1"}
    await found.close()


async def test_a_file_that_could_not_be_used_is_read_again_until_it_can(
    registry: BackendRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmproxy.backends.discovery.asyncio.sleep", lambda _: real_sleep(0))
    listed, ca = tmp_path / "backends.json", tmp_path / "ca.pem"
    listed.write_text(json.dumps({"backends": [{"name": "a", "url": "https://127.0.0.1:1", "tls": {"ca": str(ca)}}]}))
    expected: list[Collection[str]] = []
    looks: list[bool] = []
    found = Discovery(registry, expected.append, lambda _, ok: looks.append(ok), (Names([]), Names([])))
    with capture_logs() as logs:
        found.reconfigure(Config.model_validate({"discovery": {"file": str(listed)}}))
        await until(lambda: len(looks) >= 3)
        assert expected == [{"file"}]
        trustme.CA().cert_pem.write_to_path(str(ca))
        await until(lambda: looks[-1])
        assert not expected[-1]
        assert known(registry).keys() == {"a"}
        # Nothing can see a change of permissions in size, place and time of a file.
        read = load_backends
        monkeypatch.setattr("llmproxy.backends.discovery.load_backends", unreadable)
        listed.write_text(json.dumps({"backends": [{"name": "b", "url": "http://127.0.0.1:2"}]}))
        await until(lambda: looks[-2:] == [False, False])
        monkeypatch.setattr("llmproxy.backends.discovery.load_backends", read)
        await until(lambda: known(registry).keys() == {"b"})
        await found.close()
    events = [line["event"] for line in logs if line["event"].startswith("discovery_")]
    assert events == ["discovery_failed", "discovery_recovered"] * 2


def unreadable(path: Path) -> NoReturn:
    raise ConfigError([f"{path}: cannot be read: Permission denied"])


real_sleep = asyncio.sleep
