"""Pages for operators: access, rate limit and content."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from llmproxy.config import Config, hash_of, settings_of
from llmproxy.core.adapters import Adapters
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.gateway.admin import debug as admin
from llmproxy.gateway.admin.debug import BURST, CHOICES, PAGES_PER_S, QUEUE, AdminPages
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import listing, request

AFAR = "10.0.0.7"
KEY = {"Authorization": "Bearer for-admins"}


def pages(clock: Callable[[], float] = lambda: 0.0, seats: int = 1, **fields: Any) -> AdminPages:
    config = Config.model_validate({"backends": ["http://gpu-0:8000"], **fields})
    settings = settings_of(config)
    pools = Pools(settings, {"gpu-0:8000": seats}, {}, partial(make, settings.placement, Random(0)))
    pools.backends["gpu-0:8000"].answered(0.0)
    pools.listed("gpu-0:8000", listing())
    pools.submit(request(), 0.0)
    pools.decide(0.0)
    for name in ("first", "caf\udce9"):
        pools.submit(request(label=name, flow=name, band=50), 0.0)
    return AdminPages(config, Dispatcher(pools), Adapters(pools), clock)


def look(headers: dict[str, str] | None = None, peer: str | None = "127.0.0.1", query: str = "") -> web.BaseRequest:
    # A mock has no peer. None: the peer has disconnected.
    made = make_mocked_request("GET", f"{QUEUE}{query}", headers=headers)
    return made if peer is None else made.clone(remote=peer)


def bytes_of(answer: web.Response) -> bytes:
    assert isinstance(answer.body, bytes)
    return answer.body


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_local_clients_are_admitted_where_there_is_no_admin_key(peer: str) -> None:
    assert pages().admits(look(peer=peer))
    assert not pages(admin_key=hash_of("for-admins")).admits(look(peer=peer))


def test_clients_that_a_trusted_proxy_names_are_admitted_by_their_own_address() -> None:
    page = pages(clients={"trusted_proxies": "127.0.0.1"})
    assert page.admits(look({"X-Forwarded-For": "127.0.0.5"}))
    assert not page.admits(look({"X-Forwarded-For": AFAR}))
    assert not page.admits(look({"X-Forwarded-For": f"127.0.0.5, {AFAR}"}))
    assert not page.admits(look()), "the client behind it is unknown"


@pytest.mark.parametrize("peer", [AFAR, "::ffff:10.0.0.7", "fe80::1%eth0", "192.168.0.1", None])
def test_remote_clients_are_not_admitted(peer: str | None) -> None:
    assert not pages().admits(look(peer=peer))


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"])
def test_a_local_proxy_with_forwarded_fields_is_not_admitted(name: str) -> None:
    assert not pages().admits(look({name: "127.0.0.1"}))


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8080", "127.0.0.1:8080", "[::1]:8080", "gpu-box", "10.0.0.9:81"]
)
def test_the_proxys_own_host_names_are_admitted(host: str) -> None:
    page = pages(host="gpu-box", admin={"host": "10.0.0.9"})
    assert page.admits(look({"Host": host}))
    assert page.admits(look({"Host": host, "Origin": f"http://{host}"}))


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "10.0.0.7", "[fe80::1]"]
)
def test_a_rebound_host_name_is_not_admitted(host: str) -> None:
    assert not pages().admits(look({"Host": host}))
    assert not pages().admits(look({"Host": host, "Origin": f"http://{host}"}))
    assert pages(admin_key=hash_of("for-admins")).admits(look(KEY | {"Host": host}))


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://localhost", "http://localhost:3000"])
def test_a_foreign_web_page_in_a_local_browser_is_not_admitted(origin: str) -> None:
    assert not pages().admits(look({"Host": "localhost:8080", "Origin": origin}))
    page = pages(admin_key=hash_of("for-admins"))
    assert page.admits(look(KEY | {"Host": "localhost:8080", "Origin": origin}))


def test_only_the_admin_key_admits_remote_clients() -> None:
    page = pages(admin_key=hash_of("for-admins"), api_keys=["a-client"])
    assert page.admits(look(KEY, AFAR))
    assert page.admits(look(KEY | {"X-Forwarded-For": "1.2.3.4"}))
    for wrong in ("a-client", "for-admin", hash_of("for-admins"), ""):
        assert not page.admits(look({"Authorization": f"Bearer {wrong}"}, AFAR))
    assert not page.admits(look(peer=AFAR))
    assert not pages().admits(look(KEY, AFAR)), "no key is configured"
    assert not pages().admits(look({"Authorization": "Bearer "}, AFAR))


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return given == known

    monkeypatch.setattr(admin, "compare_digest", compare)
    assert pages(admin_key=hash_of("for-admins")).admits(look(KEY, AFAR))
    assert [len(one) for pair in compared for one in pair] == [32, 32]


def test_pages_are_rate_limited() -> None:
    now = 0.0
    page = pages(lambda: now)
    statuses = [page.queue(look()).status for _ in range(int(BURST) + 1)]
    assert statuses == [200] * int(BURST) + [429]
    refused = page.queue(look(query="?request=first"))
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    now = 1.0
    assert [page.queue(look()).status for _ in range(int(PAGES_PER_S) + 1)] == [200] * int(PAGES_PER_S) + [429]
    now = 1e6
    assert [page.queue(look()).status for _ in range(int(BURST) + 1)] == [200] * int(BURST) + [429]


def test_all_pages_share_one_rate_limit() -> None:
    now = 0.0
    page = pages(lambda: now)
    assert [page.queue(look()).status for _ in range(int(BURST) - 2)] == [200] * int(BURST - 2)
    assert [page.adapters().status, page.explain(look()).status] == [200, 200]
    assert [page.adapters().status, page.explain(look()).status] == [429, 429]
    assert page.queue(look()).status == 429


def test_bands_are_named_and_pages_are_not_cached() -> None:
    answer = pages(bands={"urgent": 50}).queue(look(query="?request=first"))
    assert answer.headers["Cache-Control"] == "no-store"
    assert orjson.loads(bytes_of(answer))["band"] == "urgent"
    answer = pages().queue(look(query="?request=first"))
    assert orjson.loads(bytes_of(answer))["band"] == "50"


def test_a_flow_name_that_is_not_utf8_is_shown() -> None:
    answer = pages().queue(look())
    assert answer.status == 200
    assert b"caf\\udce9" in bytes_of(answer)


def explained(query: str = "", granted: int = 0) -> tuple[int, Any]:
    """Status and body of the page on choices, `granted` requests after it was opened."""
    page = pages(lambda: 5.0, 99, scheduling={"placement": "cost"})
    for number in range(granted):
        page._pools.submit(request(id=f"n{number}", label=f"name-{number}"), 1.0)
    page._pools.decide(1.0)
    answer = page.explain(look(query=query))
    assert answer.headers["Cache-Control"] == "no-store"
    # Half a pair, as in the name that is no text, is nothing to the faster reader.
    return answer.status, json.loads(bytes_of(answer))


def test_the_last_choices_are_shown_up_to_the_limit() -> None:
    status, result = explained(granted=20)
    (pool,) = result["pools"]
    assert (status, result["placement"], pool["pool"], pool["priced"]) == (200, "cost", "base", True)
    # Three more came before them: see `pages`.
    assert (len(pool["choices"]), pool["more"]) == (CHOICES, 23 - CHOICES)
    assert (pool["choices"][0]["request"], pool["choices"][0]["age_s"]) == ("name-19", 4.0)
    assert len(explained("?limit=100", granted=20)[1]["pools"][0]["choices"]) == 23
    assert len(explained("?limit=1", granted=20)[1]["pools"][0]["choices"]) == 1


@pytest.mark.parametrize("limit", ["0", "101", "-1", "1.5", "many", "", "\u0663", "1" * 5_000])
def test_the_limit_of_choices_must_be_within_bounds(limit: str) -> None:
    status, result = explained(f"?limit={limit}")
    assert (status, result["error"]["message"]) == (400, "`limit` should be an integer from 1 to 100.")


def test_choices_for_one_request_are_found() -> None:
    status, result = explained("?request=name-3", granted=20)
    assert (status, [one["id"] for one in result["pools"][0]["choices"]]) == (200, ["n3"])
    status, result = explained("?request=nobody", granted=20)
    assert (status, result["error"]["message"]) == (404, "No choice for a request `nobody` is remembered.")
    status, result = explained("?request=", granted=1)
    assert (status, len(result["pools"][0]["choices"])) == (200, 4)


def test_a_placement_without_prices_is_shown_as_such() -> None:
    answer = pages(scheduling={"placement": "session"}).explain(look())
    result = orjson.loads(bytes_of(answer))
    assert (result["placement"], result["pools"][0]["priced"], result["pools"][0]["choices"]) == ("session", False, [])


def test_a_request_that_does_not_wait_is_not_found() -> None:
    answer = pages().queue(look(query="?request=nobody"))
    assert answer.status == 404
    assert orjson.loads(bytes_of(answer))["error"]["message"] == "No request `nobody` waits."
