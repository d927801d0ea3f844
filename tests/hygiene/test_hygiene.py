"""What is ambiguous in HTTP/1 is refused, and what is not arrives at a backend in one form only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.house import house, until
from tests.e2e.scripted import answering, scripted
from tests.hygiene.observe import bench, differences, observe
from tests.hygiene.table import PAGE, page, row
from tests.hygiene.vector import chunked, post
from tests.hygiene.vectors import TABLE

NO_RETRY: dict[str, Any] = {"retry": {"extra_attempts": 0}}


@pytest.mark.parametrize("pieces", [1, 30])
@pytest.mark.parametrize("group", TABLE)
async def test_what_comes_of_it(group: str, pieces: int, caplog: pytest.LogCaptureFixture) -> None:
    vectors = [vector for vector in TABLE[group] if pieces == 1 or not vector.name.endswith("in one piece")]

    found: dict[str, str] = {}
    for hasty in (False, True):
        async with bench(hasty=hasty) as (home, backend):
            for vector in (each for each in vectors if each.waits is hasty):
                found[vector.name] = differences(vector, await observe(home, backend, vector.sent, pieces=pieces))
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert not caplog.records, "the server library found nothing to complain of"


def test_the_page_tells_what_is_tested() -> None:
    rows = {
        group: [row(vector, vector.statuses, vector.closed, vector.reached) for vector in vectors]
        for group, vectors in TABLE.items()
    }
    assert PAGE.read_text() == page(rows), "python -m tests.hygiene.table writes it anew"


# --- the other leg: heads of answers ----------------------------------------------------------------------------------

ANSWER = b'{"a":1}'


@pytest.mark.parametrize(
    ("field", "passed"),
    [
        (b"x-a: b\tc\r\n", b"x-a: b\tc\r\n"),
        (b"content-encoding: gzip\r\n", b"content-encoding: gzip\r\n"),
        (b"x-request-id: not-ours\r\n", b""),
        (b"connection: x-a\r\nx-a: not-ours\r\n", b""),
    ],
)
async def test_what_a_client_sees_of_a_field_of_an_answer(field: bytes, passed: bytes) -> None:
    async with answered(field) as got:
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")
        assert got.endswith(ANSWER)
        assert passed in got
        assert b"not-ours" not in got
        assert got.count(b"content-length") == 1


@pytest.mark.parametrize(
    "field",
    [b"content-length: 7\r\n", b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"x-a: b\rx-evil: c\r\n",
     b"transfer-encoding: gzip\r\n", b"x-a : b\r\n", b"x-a: \x00\r\n", b"x\x01a: b\r\n",
     b"x-a: b\r\n x-evil: c\r\n", b"x-a: b\x07c\r\n", b"x-a: b\x7fc\r\n"],
)  # fmt: skip
async def test_an_answer_that_can_be_read_in_two_ways_is_a_broken_one(field: bytes) -> None:
    async with answered(field) as got:
        assert got.startswith(b"HTTP/1.1 502 ")
        assert b"evil" not in got


@asynccontextmanager
async def answered(field: bytes) -> AsyncIterator[bytes]:
    """What a client gets of an answer with a length and one more field."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%scontent-length: 7\r\n\r\n"
    async with (
        scripted(answering(head % field + ANSWER)) as backend,
        house(extra=[backend.url], **NO_RETRY) as home,
        home.wire(post(b"connection: close")) as (reader, _),
    ):
        yield await reader.read()


async def test_what_cannot_be_parsed_is_neither_repeated_nor_logged(capsys: pytest.CaptureFixture[str]) -> None:
    async with bench() as (home, backend):
        for broken in (b"authorization: Bearer sk-secret\x00", b"authorization: Bearer sk-secret\x01", b"sk-secret"):
            seen = await observe(home, backend, post(broken))
            assert seen.statuses == (400,)
            assert b"secret" not in seen.told
        assert home.outcomes()["bad_request"] == 3
    told = capsys.readouterr()
    assert "secret" not in told.out + told.err
    assert "Traceback" not in told.out + told.err


async def test_a_body_whose_framing_breaks_is_refused_at_once() -> None:
    async with bench() as (home, backend), home.wire(chunked(b"")) as (reader, writer):
        # The head is read by now, and its handler waits for the body.
        await until(lambda: home.proxy.walker.walking)
        writer.write(b"zz\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        await reader.read()
        assert not backend.requests
        assert home.outcomes() == {"bad_request": 1}
