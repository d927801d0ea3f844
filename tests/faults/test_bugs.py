"""Bugs of the proxy itself: one 500 in the dialect of the endpoint, a traceback in the log, and nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.gateway.proxying.relay import Relay
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.observe.exit_batch import ExitBatch
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, Answer, raw_post, serving
from tests.faults.rig import receive


def boom(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


def reported(answer: Answer, log: list[Any]) -> bool:
    """Whether the client got the one error, and the log has its traceback under the same id."""
    error = answer.json["error"]
    assert (answer.status, "its log has the details" in error["message"]) == (500, True)
    bugs = [line for line in log if line["event"] == "internal"]
    assert [line["request_id"] for line in bugs] == [answer.headers["x-request-id"]]
    return isinstance(bugs[0]["exc_info"], ZeroDivisionError)


async def test_a_bug_on_a_page_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FAST) as proxy:
        with monkeypatch.context() as patch, capture_logs() as log:
            patch.setattr(proxy.app.pools.catalogue, "models", boom)
            assert reported(await proxy.get("/v1/models"), log)
        proxy.bugs_expected = 1
        assert (await proxy.get("/v1/models")).status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_bug_while_serving_is_a_500(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FAST) as proxy:
        with monkeypatch.context() as patch, capture_logs() as log:
            patch.setattr(Relay, "_exchange", boom)
            answer = await proxy.post(path, HELLO)
            assert reported(answer, log)
            assert (answer.json.get("type") == "error") == (path == "/v1/messages")
        proxy.bugs_expected = 1
        assert (await proxy.chat()).status == 200


async def test_a_bug_while_recording_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FAST) as proxy:
        with monkeypatch.context() as patch, capture_logs() as log:
            patch.setattr(proxy.app.handler, "log_lines", ExitBatch(boom))
            received = await receive(proxy, raw_post(HELLO))
            proxy.app.flush_records()
        assert (received.status, received.whole) == (200, True)
        assert [line["event"] for line in log].count("internal") == 1
        assert proxy.outcomes() == {"completed": 1}, "counted once"
        assert (await proxy.chat()).status == 200


async def test_a_bug_in_mid_stream_cuts_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FAST) as proxy:
        with monkeypatch.context() as patch, capture_logs() as log:
            seen = 0
            feed = StreamTap.feed

            def fails_later(tap: StreamTap, data: bytes) -> bytes:
                nonlocal seen
                seen += 1
                return feed(tap, data) if seen < 5 else boom()

            patch.setattr(StreamTap, "feed", fails_later)
            received = await receive(proxy, raw_post(ENDLESS))
        assert (received.status, received.whole) == (200, False)
        assert b"HTTP/1.1" not in received.body
        assert [line["event"] for line in log].count("internal") == 1
        proxy.bugs_expected = 1
        assert (await proxy.chat()).status == 200
