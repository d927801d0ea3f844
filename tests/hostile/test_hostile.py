"""A fixed sample of each group of `make hostile`, and tests that wrong outcomes are found."""

from __future__ import annotations

import pytest

from tests.e2e.scripted import whole
from tests.hostile import answers, backends, clients, requests
from tests.hostile.__main__ import PLAYS, Play, cases_of
from tests.hostile.clients import Seen
from tests.hostile.requests import INNER, SENTINEL, in_chunks, sized
from tests.strictness.answers import BODY, NEXT, SIZE, Got, whole_of
from tests.strictness.observe import ANSWER
from tests.strictness.reading import End, read_answers, read_requests

CASES = 8


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("make", "play", "name"), [(make, play, name) for made, play in PLAYS for name, make in made.items()]
)
async def test_cases_of_each_group_have_no_findings(make: object, play: Play, name: str) -> None:
    found = await play(cases_of(make, 1, CASES), name.startswith("sound"), 1)  # type: ignore[arg-type]
    assert found == []


# --- the oracle -------------------------------------------------------------------------------------------------------


def reached(user: bytes) -> bytes:
    """A request as the proxy would write it."""
    body = requests.body_of(user.decode())
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nx-request-id: 1\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body


OK = whole(ANSWER)
REFUSED = whole(b'{"error":{}}', "400 Bad Request")


@pytest.mark.parametrize(
    ("sent", "seen", "finding"),
    [
        # TE.CL with a spelling that only one of two readers takes for chunked: the hidden request arrives.
        (b"", Seen(OK * 2, False, (reached(b"smuggled"), reached(b"sentinel"))), "no request of this client"),
        (sized("outer"), Seen(OK * 3, False, (reached(b"outer"),) * 2), "comes too often"),
        (sized("outer"), Seen(OK * 3, False, (reached(b"outer"), reached(b"sentinel"))), "3 answers to 2 requests"),
        (b"", Seen(OK, False, (reached(b"sentinel").replace(b"\r\n\r\n", b"\r\nTE: x\r\n\r\n"),)), "hop-by-hop"),
        (b"", Seen(OK, False, (reached(b"sentinel").replace(b"chat", b"cat"),)), "no route"),
        (b"", Seen(OK.replace(b"200", b"500"), False, (reached(b"sentinel"),)), "status 500"),
        (b"", Seen(OK.replace(b"\r\n\r\n", b"\r\nx-evil: 1\r\n\r\n"), False, (reached(b"sentinel"),)), "fields"),
        (b"", Seen(b"HTTP/0.8" + OK[8:], False, (reached(b"sentinel"),)), "no sound HTTP"),
        (b"", Seen(OK[:-1], False, (reached(b"sentinel"),)), "no sound HTTP"),
        (b"", Seen(REFUSED, False, ()), "0 of at least 1 sound requests"),
    ],
)
def test_every_wrong_outcome_for_a_client_is_found(sent: bytes, seen: Seen, finding: str) -> None:
    assert finding in " ".join(clients.violations(sent, seen, sound=True))


def test_a_correct_outcome_for_a_client_has_no_finding() -> None:
    seen = Seen(OK * 2, False, (reached(b"outer"), reached(b"sentinel")))
    assert clients.violations(sized("outer"), seen, sound=True) == []
    assert clients.violations(b"\x00", Seen(REFUSED, False, ())) == []


@pytest.mark.parametrize(
    ("sent", "data", "finding"),
    [
        (whole_of(SIZE), whole(BODY) * 2, "more than one"),
        (whole_of(SIZE) + answers.INNER, whole(b'{"smuggled": 1}'), "was not given"),
        (whole_of(SIZE, SIZE), whole(BODY), "was not given"),
        (whole_of(SIZE), REFUSED, "not passed on"),
        (whole_of(SIZE), b"", "no answer"),
        (whole_of(SIZE), whole(BODY, "200 O\x1bK"), "no sound one"),
        (whole_of(b"content-length: 9\r\n"), whole(BODY + b"xx")[:-1], "beginning"),
    ],
)
def test_every_wrong_outcome_for_a_backend_is_found(sent: bytes, data: bytes, finding: str) -> None:
    assert finding in " ".join(backends.violations(sent, Got(data, whole(NEXT), kept=True)))


def test_bytes_of_one_answer_in_the_next_are_found() -> None:
    assert "next request" in " ".join(
        backends.violations(whole_of(SIZE), Got(whole(BODY), b"x" + whole(NEXT), kept=True))
    )
    assert backends.violations(whole_of(SIZE), Got(whole(BODY), whole(NEXT), kept=True)) == []


# --- the strict reader ------------------------------------------------------------------------------------------------


def test_the_reader_finds_every_request() -> None:
    reading = read_requests(sized("a") + in_chunks("b") + INNER + SENTINEL + INNER)
    assert [message.body for message in reading.messages] == [
        requests.body_of(user) for user in ("a", "b", "smuggled", "sentinel")
    ], "nothing behind a request that closes"
    assert reading.end is End.CLEAN


@pytest.mark.parametrize(
    ("spoilt", "end"),
    [
        (sized("a").replace(b"\r\n", b"\n"), End.BROKEN),
        (sized("a").replace(b"host: proxy.example\r\n", b""), End.BROKEN),
        (sized("a", b"transfer-encoding: chunked"), End.BROKEN),
        (sized("a", b"content-length: 1"), End.BROKEN),
        (sized("a", b"x-a : b"), End.BROKEN),
        (sized("a", b"x-a: b\r\n c"), End.BROKEN),
        (sized("a")[:-1], End.SHORT),
        (in_chunks("a")[:-1], End.SHORT),
        (in_chunks("a").replace(b"a=b\r", b"a=b"), End.BROKEN),
        (in_chunks("a").replace(b"x-t: u", b"content-length: 1"), End.BROKEN),
        (b"\x16\x03\x01\r\n", End.BROKEN),
    ],
)
def test_the_reader_accepts_no_broken_request(spoilt: bytes, end: End) -> None:
    assert read_requests(spoilt) == read_requests(b"") or read_requests(spoilt).messages == ()
    assert read_requests(spoilt).end is end


def test_the_reader_finds_every_answer() -> None:
    assert [message.status for message in read_answers(answers.SOUND[3], closed=False).messages] == [100, 200]
    assert read_answers(whole_of(), closed=False).end is End.SHORT
    assert read_answers(whole_of(), closed=True).messages[0].body == BODY
    assert read_answers(whole_of(SIZE, SIZE), closed=True).end is End.BROKEN
