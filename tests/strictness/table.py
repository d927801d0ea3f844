"""`python -m tests.strictness.table` writes docs/reference/strictness.md from observations; exits 1 on differences."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import uvloop

from llmproxy.telemetry import logs
from tests import ROOT
from tests.strictness.answers import ANSWERS, answer_bench, answer_differences, answer_row, client_saw, observe_answer
from tests.strictness.observe import FREE, HASTY, Observed, bench, differences, observe
from tests.strictness.vector import Vector
from tests.strictness.vectors import TABLE

PAGE = ROOT / "docs" / "reference" / "strictness.md"
PREFACE = """# HTTP strictness

If two servers can read one request in two ways, an attacker can hide a second request in the first. So the proxy is
strict:

- It parses strictly (llhttp, in aiohttp). It also refuses what this parser lets through and another server might read
  differently (`gateway/http/strictness.py`).
- It writes every request to a backend anew: one request line with a path from its own table of routes, one `Host`, one
  `Content-Length`, no `Transfer-Encoding`, no field for a single hop. No request can choose its backend, whatever its
  target or `Host` says.
- A refused request gets an error in JSON, is counted (`outcome="bad_request"`) and logged in one line. Bytes that could
  not be parsed are neither sent back nor logged, because they may contain a key. If the end of a request is in doubt,
  the connection is closed.
- A client that speaks another protocol than the port (TLS, HTTP/2, or plain http at a port of TLS) gets an answer that
  it can show, and the log says so once (`wrong_protocol`).

**Answers of backends** are read as strictly (llhttp again). An answer whose end could be found in two places, or whose
head is no HTTP/1, is broken: that is 502, or, if its head was already sent, an end that the client can tell from a
whole answer. The last table has what was tried, and the little that is read leniently.

**Compression.** Bodies are never inflated: a compressed request is refused (415). A client's `Accept-Encoding` is not
passed on, because a compressor would hold back the tokens of a stream. An answer that comes compressed all the same is
passed on byte by byte. Its first byte counts as its first token, its tokens are not known, a usage event that the proxy
asked for stays in it, and if it breaks it is cut without an error event.

**Polls.** What a poll reads, unpacks and parses is limited (4 MiB) and read in slices, so that other work goes on. If a
page exceeds a limit, the log names both (`backend_unread` for its load).

**Forms** (`multipart/form-data`) are refused if engines may read their fields in another way. The content type has one
parameter, `boundary`. Each part is `form-data`, without control characters in its head. `model`, `stream` and the field
that names the session are given once, and not as files. **A JSON body** is UTF-8 without a byte order mark, whatever
its content type says.

## Limits

All but one are in the section `clients` of the configuration. `tests/e2e/test_client_limits.py` and `tests/strictness`
test them.

| what a client does | key, default | answer |
| --- | --- | --- |
| takes its time over a head (slow loris), drips it or stops within it | `head_timeout_s`, 30 | 408, closed |
| does not end its TLS handshake | `head_timeout_s`, 30 | closed in silence |
| takes its time over a body: stops / drips | `body_silence_s`, 30 / `body_timeout_s`, 600 | 408, closed |
| asks nothing on an open connection | `idle_timeout_s`, 75 | closed in silence |
| does not read a short answer, or the end of one on a connection that closes | `idle_timeout_s`, 75 | cut |
| sends a large head / many fields | `head_bytes_max`, 131072 / `head_fields_max`, 128 | 431, closed |
| sends a large body | `body_bytes_max` (beside `clients`), 67108864 | 413 |
| many send bodies at once | `body_bytes_total_max` (beside `clients`), 2147483648 | 429, see below |
| opens many connections, over all | `connections_max`, 65536, or [fewer](../how-to/open-files.md) | 503, closed |
| opens many connections from one address | `address_connections_max`, none | 429, closed |
| sends many requests from one address | `address_requests_per_s`, none | 429 |

**Limits by address** are off unless set, because all clients of a gateway in front have one address. The address is
that of the connection: `X-Forwarded-For` is not believed. An IPv6 network of 64 bits counts as one address. The
requests of one second may come at once. The proxy's own pages are not counted. If a client still sends while it is
refused, the end of the connection may reach it before the answer does. With TLS, a connection counts from the beginning
of its handshake, and one too many is closed before it, without an answer.

**`body_bytes_total_max`** limits the request bodies in memory: arriving, waiting and sent out.

- It counts bytes that have come, not those announced. A client that announces much and sends little keeps nobody out.
- When new bytes do not fit, one of the largest bodies that are still arriving is refused (429, closed), and the rest go
  on. A body that does not fit although nothing else arrives is refused itself.
- The last eighth is kept for bodies that come with their head, so that small requests pass while uploads fill the rest.
- Each of N workers has an N-th of it, and at least `body_bytes_max`. In addition, a connection that sends faster than
  it is read holds up to 128 KB.

## Hostile testing

`make hostile` ([testing](../development/testing.md#hostile-testing)) continues where the tables end. A run of
2026-11-22, on two cores that others used as well, seed 2144088989:

| group | cases | findings | minutes |
| --- | --- | --- | --- |
| requests: framing, request lines, fields, line ends, every byte | 16,180 | 0 | 0.3 |
| answers of backends: the same, cut short, two in one | 12,482 | 0 | 0.6 |
| JSON bodies through the proxy | 5,999 | 0 | 0.3 |
| readers of bodies, forms and answers, without a socket | 50,015 | 0 | 2.5 |
| the engine's OpenAPI document (25 requests of each route) | 175 | 0 | 1.6 |
| the tables below | 258 | 0 | 0.1 |

Found by it, and corrected: the last field of a trailer became a field of the next request; the answer to a request of
HTTP/0.9 or 2.0 named that version; answers in transfer codings other than chunked, and `chunked` before a tab, passed
with the coding still on them.

## What was tried

`python -m tests.strictness.table` writes the tables. It sends each row to a proxy and keeps the bytes that reach the
backend, or lets the backend answer with a row and keeps the bytes that reach the client. `tests/strictness` tests the
same rows. `python -m tests.strictness.corpus` sends the requests that gunicorn 27.0.1 has in its source distribution
(143 in `tests/requests`, MIT; not part of this repository):
@CORPUS@

"after" says what happened to the connection. "backend" says how many requests reached it, each in the form above.
"""
CORPUS = """of the 81 that are invalid there, 69 are refused here too. Of the other twelve, nine are above gunicorn's
smaller size limits, one contradicts itself about `X-Forwarded-Proto`, which is not read here, one has two empty
lines before its request line, and one lacks the end of a body that nobody reads because its path does not exist. Of the
62 valid ones, 23 are refused, by choice: PROXY protocol, folded lines, transfer codings beside one plain `chunked`, no
`Host`, fragments, unregistered methods, requests behind one that closes."""

ANSWERS_HEAD = """
### Answers of backends

"after" says what happened to the backend's connection. The next request got its own answer each time, and nothing that
was hidden in an answer (`evil`) reached a client.

| answered | client saw | after |
| --- | --- | --- |
"""


def page(rows: Mapping[str, Sequence[str]], answer_rows: Sequence[str]) -> str:
    """The page with these rows under these headings."""
    parts = [PREFACE.replace("@CORPUS@", CORPUS)]
    for group, lines in rows.items():
        parts.append(f"\n### {group}\n\n| sent | client saw | after | backend |\n| --- | --- | --- | --- |\n")
        parts += [line + "\n" for line in lines]
    parts.append(ANSWERS_HEAD)
    parts += [line + "\n" for line in answer_rows]
    return "".join(parts)


def row(vector: Vector, statuses: Sequence[int], closed: bool, reached: int) -> str:
    """The row of one vector."""
    backend = {0: "nothing", 1: "one request"}.get(reached, f"{reached} requests")
    if vector.seen:
        backend += f", with `{_shown(vector.seen)}`"
    if vector.unseen:
        backend += f", without `{_shown(vector.unseen)}`"
    client = ", then ".join(map(str, statuses)) or "nothing"
    return f"| {vector.name} | {client} | {'closed' if closed else 'open'} | {backend} |"


def _shown(data: bytes) -> str:
    return data.decode().strip()


async def observed_requests() -> tuple[dict[str, list[str]], list[str]]:
    """The observed rows of requests by group, and the differences from the table."""
    rows: dict[str, list[str]] = {}
    wrong: list[str] = []
    for group, vectors in TABLE.items():
        found: dict[int, Observed] = {}
        for limits in (FREE, HASTY):
            # One after the other: each proxy checks what was left behind since it started.
            async with bench(limits) as (home, backend):
                for i, vector in enumerate(vectors):
                    if vector.waits is (limits is HASTY):
                        found[i] = await observe(home, backend, vector.sent)
        for i, vector in enumerate(vectors):
            seen = found[i]
            rows.setdefault(group, []).append(row(vector, seen.statuses, seen.closed, len(seen.reached)))
            if wrong_here := differences(vector, seen):
                wrong.append(f"{group}, {vector.name}: {wrong_here}")
    return rows, wrong


async def observed_answers() -> tuple[list[str], list[str]]:
    """The observed rows of answers, and the differences from the table."""
    rows, wrong = [], []
    async with answer_bench() as (home, backend):
        for vector in ANSWERS:
            got = await observe_answer(home, backend, vector.sent, vector.closes)
            status, cut, _ = client_saw(got)
            rows.append(answer_row(vector, status, cut, got.kept))
            if wrong_here := answer_differences(vector, got):
                wrong.append(f"{vector.name}: {wrong_here}")
    return rows, wrong


async def observed() -> tuple[dict[str, list[str]], list[str], list[str]]:
    """All rows, those of requests by group, and the differences from the table."""
    rows, wrong = await observed_requests()
    answer_rows, wrong_answers = await observed_answers()
    return rows, answer_rows, wrong + wrong_answers


def main() -> int:
    logs.configure("json", "error")
    rows, answer_rows, wrong = uvloop.run(observed())
    PAGE.write_text(page(rows, answer_rows))
    print("\n".join(wrong) or f"{sum(map(len, rows.values())) + len(answer_rows)} rows, all as in the table")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
