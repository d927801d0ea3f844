"""Answers for the page in a browser: current state, history, last requests, configuration."""

from __future__ import annotations

import asyncio
import io
import json
import re
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from struct import unpack_from
from typing import Any

import pytest

from llmproxy.config import hash_of
from llmproxy.observe.live.snapshot import LiveSnapshot
from tests.e2e.proxies import CHAT, FAST, HELLO, ProxyUnderTest, one_seat, serving, until

KEY = {"authorization": "Bearer for-admins"}
AFAR = {"x-forwarded-for": "1.2.3.4"}
DATA = ("/debug/live", "/debug/history", "/debug/requests", "/debug/config", "/debug/events")


def tick(proxy: ProxyUnderTest) -> None:
    """Let a second pass for the history alone."""
    recorder = proxy.app.recorder
    proxy.app.flush_records()
    # Beyond the reach of the clock, whose own seconds are of the past then.
    recorder.tick(max(recorder.history.last_s, asyncio.get_running_loop().time() + 3_600.0) + 2.0)


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyUnderTest]:
    """Two fast replicas, and a history whose seconds pass when a test says so."""
    async with serving(FAST, FAST) as proxy:
        tick(proxy)
        yield proxy


async def columns(proxy: ProxyUnderTest, query: str) -> dict[str, list[float]]:
    body = (await proxy.get(f"/debug/history?{query}")).body
    size = unpack_from("<I", body)[0]
    head = json.loads(body[4 : 4 + size])
    values = array("f")
    values.frombytes(body[4 + size :])
    rows = head["rows"]
    assert len(values) == rows * len(head["names"])
    return {name: list(values[i * rows : (i + 1) * rows]) for i, name in enumerate(head["names"])}


async def test_the_state_of_this_second(log: io.StringIO, proxy: ProxyUnderTest) -> None:
    for i in range(3):
        assert (await proxy.chat(HELLO, headers={"x-request-id": f"r{i}"})).status == 200
    tick(proxy)
    response = await proxy.get("/debug/live")
    live = response.json
    assert response.headers["cache-control"] == "no-store"
    assert live["summary"] == {"level": "ok", "text": "Healthy: 2 of 2 replicas up, nothing waits."}
    assert live["minute"]["completed"] == 3
    assert [band["band"] for band in live["bands"]] == ["critical", "default", "sheddable", "idle"]
    assert live["bands"][1]["ended"]["completed"] == 3
    assert live["bands"][1]["wait_s"]["p99"] is not None
    assert {one["backend"]: one["state"] for one in live["backends"]} == {"b0": "up", "b1": "up"}
    assert sum(one["ended"] for one in live["backends"]) == 3
    assert live["row"]["band/default/waiting"] == 0.0
    assert {"backend_up", "backend_added"} <= {event["event"] for event in live["events"]}
    (listed, *_) = (await proxy.get("/debug/events")).json["events"]
    assert timedelta(0) <= datetime.now(UTC) - datetime.fromisoformat(listed["time"]) < timedelta(minutes=1)
    assert "backend_up" in log.getvalue()


async def test_a_backend_is_ejected_since_the_first_of_its_probes(
    proxy: ProxyUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, now = proxy.app.recorder, asyncio.get_running_loop().time()
    ejected = [replace(one, state="ejected", since_s=now - 100.0) for one in recorder.statuses()]
    monkeypatch.setattr(recorder, "statuses", lambda: ejected)
    for before_s, name, why in (
        (90.0, "backend_ejected", "no connection"),
        (80.0, "backend_back", ""),
        (30.0, "backend_ejected", "slow: 8.0 times as slow as usual"),
        (20.0, "backend_ejected", "slow: its probe was as slow"),
        (10.0, "backend_ejected", "slow: its probe was as slow"),
    ):
        recorder.events.note("warning", name, {"backend": "b0", "why": why}, now - before_s)
    tick(proxy)
    shown = (await proxy.get("/debug/live")).json["backends"][0]
    assert shown["why"] == "slow: 8.0 times as slow as usual"
    assert 30.0 <= shown["since_s"] < 60.0


async def test_one_document_a_second_serves_all(proxy: ProxyUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    tick(proxy)
    built = 0
    content = LiveSnapshot.content

    def counted(self: LiveSnapshot) -> dict[str, Any]:
        nonlocal built
        built += 1
        return content(self)

    monkeypatch.setattr(LiveSnapshot, "content", counted)
    answers = [(await proxy.get("/debug/live")).body for _ in range(20)]
    assert len(set(answers)) == 1
    assert built <= 1
    second = json.loads(answers[0])["second"]
    assert (await proxy.get(f"/debug/live?since={second}")).status == 204
    assert (await proxy.get(f"/debug/live?since={second - 1}")).status == 200
    tick(proxy)
    assert (await proxy.get(f"/debug/live?since={second}")).status == 200
    assert built == 2


async def test_nothing_is_built_while_nobody_looks(proxy: ProxyUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Any) -> dict[str, Any]:
        raise AssertionError

    monkeypatch.setattr(LiveSnapshot, "content", never)
    for _ in range(3):
        tick(proxy)
    assert proxy.app.recorder.history.last_s > 0


async def test_page_is_compressed_for_clients_that_accept_it(proxy: ProxyUnderTest) -> None:
    tick(proxy)
    plain = await proxy.http.get(proxy.url + "/debug/live", headers={"accept-encoding": "identity"})
    # The client's library unpacks it.
    packed = await proxy.http.get(proxy.url + "/debug/live", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert await packed.read() == await plain.read()


async def test_page_links_to_served_files_and_names_its_icon(proxy: ProxyUnderTest) -> None:
    """A browser asks for `/favicon.ico` otherwise, which is nothing here."""
    head = (await proxy.get("/ui")).body.decode().partition("</head>")[0]
    links = dict(re.findall(r'<link rel="(\w+)" href="([^"]+)">', head))
    assert links.keys() == {"icon", "stylesheet"}
    assert [(await proxy.get(path)).status for path in links.values()] == [200, 200]


async def test_the_past_in_columns(proxy: ProxyUnderTest) -> None:
    answers = [await proxy.chat(HELLO | {"stream": True, "max_tokens": 4}) for _ in range(4)]
    assert {answer.status for answer in answers} == {200}
    tick(proxy)
    found = await columns(proxy, "columns=fleet/,band/default&span=60")
    assert set(found) >= {"fleet/completed_per_s", "band/default/waiting"}
    assert not any(name.startswith(("backend/", "band/critical")) for name in found)
    assert sum(value for value in found["fleet/completed_per_s"] if value == value) == pytest.approx(4.0)
    everything = await columns(proxy, "span=60")
    served = {f"backend/{answer.backend}/ttft_s" for answer in answers}
    assert {"backend/b0/state", "flow/default/base/wait_s"} | served <= set(everything)


@pytest.mark.parametrize("span", ["0", "-1", "x", "86401", "1e3", "٣", "99999999999999999999"])
async def test_a_span_that_is_none(proxy: ProxyUnderTest, span: str) -> None:
    response = await proxy.get(f"/debug/history?span={span}")
    assert response.status == 400
    assert "span" in (response.json)["error"]["message"]


async def test_the_last_requests_and_the_story_of_one(proxy: ProxyUnderTest) -> None:
    assert (await proxy.chat(HELLO, headers={"x-request-id": "first"})).status == 200
    assert (await proxy.chat(HELLO | {"model": "nothing"}, headers={"x-request-id": "lost"})).status == 404
    both = (await proxy.get("/debug/requests")).json
    assert [one["request_id"] for one in both["requests"]] == ["lost", "first"]
    assert [one["kind"] for one in both["requests"]] == ["client_error", "completed"]
    for query in ("kind=completed", "outcome=completed", "band=default", "model=base", "backend=b0", "backend=b1"):
        found = (await proxy.get(f"/debug/requests?{query}")).json
        assert [one["request_id"] for one in found["requests"]] in (["first"], [])
    only = (await proxy.get("/debug/requests?limit=1")).json
    assert (len(only["requests"]), only["more"]) == (1, 1)
    story = (await proxy.get("/debug/requests?request=first")).json
    assert story["waits"] is None
    assert story["ended"]["outcome"] == "completed"
    assert [one["chosen"] for one in story["choices"]] == [story["ended"]["backend"]]
    (attempt,) = story["attempts"]
    assert (attempt["backend"], attempt["verdict"]) == (story["ended"]["backend"], "served")
    assert 0.0 <= attempt["granted_s"] <= attempt["ended_s"]
    for unknown in ("nobody", "", "%ff"):
        assert (await proxy.get(f"/debug/requests?request={unknown}")).status == 404
    for wrong in ("0", "101", "x", "", "1" * 5_000, "0000000010000", "000000001" + "0" * 5_000):
        assert (await proxy.get(f"/debug/requests?limit={wrong}")).status == 400
        assert (await proxy.get(f"/debug/explain?limit={wrong}")).status == 400
        assert (await proxy.get(f"/debug/history?span={wrong.replace('101', '86401')}")).status == 400


async def test_story_of_a_waiting_request() -> None:
    async with one_seat() as (proxy, seat):
        waits = await proxy.enter("waits")
        story = (await proxy.get("/debug/requests?request=waits")).json
        assert (story["waits"]["band"], story["waits"]["ahead_in_flow"], story["ended"]) == ("default", 0, None)
        tick(proxy)
        live = (await proxy.get("/debug/live")).json
        assert live["summary"]["level"] == "warning"
        assert live["summary"]["text"].startswith("base: 1 default request waits")
        assert live["bands"][1]["reasons"] == ["no backend has room"]
        assert story["waits"]["waited_for"] == "no backend has room"
        (flow,) = live["flows"]
        assert (flow["flow"], flow["waiting"], flow["due"]) == ("base", 1, 1.0)
        assert (flow["weight"], live["fairness"]) == (1.0, "fair_share")
        seat.close()
        assert (await waits).status == 200


async def test_story_of_a_request_without_a_backend_says_why_it_waited() -> None:
    async with one_seat(queue={"requests_max": 1}, trust_headers="all") as (proxy, seat):
        (await proxy.enter("left")).cancel()
        await until(lambda: not proxy.queued)
        assert (await (await proxy.enter("late", **{"x-llm-d-inference-ttl": "0.1s"}))).status == 429
        shed = await proxy.enter("shed", **{"x-llm-d-inference-objective": "sheddable"})
        critical = proxy.waiting(**{"x-llm-d-inference-objective": "critical"})
        assert (await shed).status == 429
        for name, outcome in (("left", "cancelled"), ("late", "expired"), ("shed", "shed")):
            story = (await proxy.get(f"/debug/requests?request={name}")).json
            assert (story["ended"]["outcome"], story["attempts"]) == (outcome, [])
            assert (story["waited"]["waited_for"], story["waited"]["went_first"]) == ("no backend has room", [])
        seat.close()
        assert (await critical).status == 200


async def test_the_weight_of_a_flow_that_waits_and_never_ended_a_request() -> None:
    scheduling = {"flow": "header:x-flow", "weights": {"heavy": 3.0}}
    async with one_seat(scheduling=scheduling, trust_headers="all") as (proxy, seat):
        tasks = [await proxy.enter(name, **{"x-flow": name}) for name in ("heavy", "light")]
        tick(proxy)
        flows = (await proxy.get("/debug/live")).json["flows"]
        found = {one["flow"]: (one["weight"], one["due"]) for one in flows}
        assert found == {"heavy": (3.0, 0.75), "light": (1.0, 0.25)}
        seat.close()
        assert [(await task).status for task in tasks] == [200, 200]


async def test_origin_of_each_setting(tmp_path: Path) -> None:
    file = tmp_path / "llmproxy.yaml"
    async with serving(FAST, file=file, admin_key=hash_of("for-admins")) as proxy:
        assert (await proxy.post("/admin/reload", {}, headers=KEY)).status == 200
        page = (await proxy.get("/debug/config", headers=KEY)).json
        found = {one["key"]: one for one in page["settings"]}
        assert found["admin_key"]["value"] == "***"
        assert "hash" not in json.dumps(page)
        assert re.fullmatch(r".*llmproxy\.yaml:\d+", found["backends[b0].url"]["origin"])
        assert found["queue.max_wait_s"]["origin"] == "default"
        assert found["host"]["restart"] is True


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", [*DATA, "/ui"])
async def test_only_operators_may_look(path: str) -> None:
    async with serving(FAST) as proxy:
        assert (await proxy.get(path)).status == 200
        assert (await proxy.get(path, headers=AFAR)).status == 404
        assert (await proxy.get(path, headers={"origin": "https://evil.example"})).status == 404
    async with serving(FAST, admin_key=hash_of("for-admins")) as proxy:
        assert (await proxy.get(path, headers=AFAR | KEY)).status == 200
        # The page asks for the key; it shows nothing without one.
        assert (await proxy.get(path, headers=AFAR)).status == (200 if path == "/ui" else 404)
    async with serving(FAST, admin={"port": 0}) as proxy:
        assert (await proxy.get(path)).status == 404
        assert (await proxy.get(f"{proxy.app.admin_url}{path}")).status == 200


async def test_the_page_has_strict_headers_and_is_asked_for_once(proxy: ProxyUnderTest) -> None:
    for path in ("/ui", "/ui/"):
        page = await proxy.get(path)
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        again = await proxy.get(path, headers={"if-none-match": page.headers["etag"]})
        assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/ui/../debug.py", "/ui/%2e%2e/router.py", "/ui/nothing.js", "/ui/index.html/", "/uix"]
)
async def test_nothing_else_is_served(proxy: ProxyUnderTest, path: str) -> None:
    answer = await proxy.get(path)
    assert answer.status == (200 if path.endswith("html/") else 404)
    assert b"import" not in answer.body


async def test_these_pages_are_no_requests(proxy: ProxyUnderTest) -> None:
    for path in (*DATA, "/ui"):
        await proxy.get(path)
    assert ((await proxy.get("/debug/requests")).json)["requests"] == []
    assert CHAT not in (await proxy.get("/metrics")).body.decode()
