"""Ambiguous HTTP/1 is refused, and everything else reaches a backend in only one form."""

from __future__ import annotations

import pytest

from tests.e2e.proxies import serving, until
from tests.strictness.answers import ANSWERS, answer_bench, answer_differences, observe_answer
from tests.strictness.observe import FREE, HASTY, bench, differences, observe
from tests.strictness.vector import chunked, post
from tests.strictness.vectors import TABLE


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pieces", [1, 30])
@pytest.mark.parametrize("group", TABLE)
async def test_each_request_has_the_outcome_of_the_table(
    group: str, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = [vector for vector in TABLE[group] if pieces == 1 or not vector.name.endswith("in one piece")]

    found: dict[str, str] = {}
    for limits in (FREE, HASTY):
        async with bench(limits) as (proxy, backend):
            for vector in (each for each in vectors if each.waits is (limits is HASTY)):
                found[vector.name] = differences(vector, await observe(proxy, backend, vector.sent, pieces=pieces))
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert not caplog.records, "the server library found nothing to complain of"


async def test_each_answer_has_the_outcome_of_the_table(caplog: pytest.LogCaptureFixture) -> None:
    async with answer_bench() as (proxy, backend):
        found = {
            vector.name: answer_differences(vector, await observe_answer(proxy, backend, vector.sent, vector.closes))
            for vector in ANSWERS
        }
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert not caplog.records


@pytest.mark.parametrize(
    ("asked", "answered_with"),
    [
        (b" HTTP/0.9", b"HTTP/1.1 505"),
        (b"", b"HTTP/1.1 505"),
        (b" HTTP/2.0", b"HTTP/1.1 505"),
        (b" HTTP/1.0", b"HTTP/1.0 200"),
        (b" HTTP/1.1", b"HTTP/1.1 200"),
        (b" HTTP/1.2", b"HTTP/1.0 400"),
        (b" HTTP/1.10", b"HTTP/1.0 400"),
        (b" HTTP/3.0", b"HTTP/1.0 400"),
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_an_answer_has_a_supported_http_version(method: bytes, asked: bytes, answered_with: bytes) -> None:
    sent = method + b" /version" + asked + b"\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving() as proxy, proxy.wire(sent) as (reader, _):
        answer = await reader.read(-1)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(answered_with + b" ")
    assert (b"\r\nConnection: close" in head) == answered_with.startswith(b"HTTP/1.1")
    assert answer.count(b"HTTP/1.") == 1 + body.count(b"HTTP/1.")


async def test_unparsable_bytes_are_neither_repeated_nor_logged(capsys: pytest.CaptureFixture[str]) -> None:
    async with bench() as (proxy, backend):
        for broken in (b"authorization: Bearer sk-secret\x00", b"authorization: Bearer sk-secret\x01", b"sk-secret"):
            seen = await observe(proxy, backend, post(broken))
            assert seen.statuses == (400,)
            assert b"secret" not in seen.last_body
        assert proxy.outcomes()["bad_request"] == 3
    output = capsys.readouterr()
    assert "secret" not in output.out + output.err
    assert "Traceback" not in output.out + output.err


async def test_a_body_whose_framing_breaks_is_refused_at_once() -> None:
    async with bench() as (proxy, backend), proxy.wire(chunked(b"")) as (reader, writer):
        # The head is read by now, and its handler waits for the body.
        await until(lambda: proxy.app.handler.open_requests)
        writer.write(b"zz\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        await reader.read()
        assert not backend.requests
        assert proxy.outcomes() == {"bad_request": 1}
