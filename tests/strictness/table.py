"""`python -m tests.strictness.table` writes the tables of docs/reference/strictness.md; exits 1 on differences."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import uvloop

from llmproxy.observe import logs
from tests import ROOT
from tests.strictness.answers import ANSWERS, answer_bench, answer_differences, answer_row, client_saw, observe_answer
from tests.strictness.observe import FREE, HASTY, Observed, bench, differences, observe
from tests.strictness.vector import Vector
from tests.strictness.vectors import TABLE

PAGE = ROOT / "docs" / "reference" / "strictness.md"
ANSWERS_HEAD = """
### Answers of backends

"after" is the state of the backend's connection. The next request got its own answer each time, and no hidden second
answer (`evil`) reached a client.

| client saw | after | the backend answers |
| --- | --- | --- |
"""


def page(rows: Mapping[str, Sequence[tuple[str, str]]], answer_rows: Sequence[tuple[str, str]]) -> str:
    """The page with these rows under these headings, behind the words that it begins with."""
    parts = [PAGE.read_text().partition("\n### ")[0]]
    for group, lines in rows.items():
        parts.append(
            f"\n### {group}\n\n| client saw | after | requests | the client sends |\n| --- | --- | --- | --- |\n"
        )
        parts += _joined(lines)
    parts.append(ANSWERS_HEAD)
    parts += _joined(answer_rows)
    return "".join(parts)


def _joined(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yields a line for each outcome, with the names of all its cases."""
    names: dict[str, list[str]] = {}
    for name, outcome in rows:
        names.setdefault(outcome, []).append(name)
    for outcome, cases in names.items():
        yield f"| {outcome} | {'; '.join(cases)} |\n"


def row(vector: Vector, statuses: Sequence[int], closed: bool, reached: int) -> tuple[str, str]:
    """The name of one vector, and its outcome in cells of the table."""
    backend = str(reached)
    if vector.seen:
        backend += f", with `{_shown(vector.seen)}`"
    if vector.unseen:
        backend += f", without `{_shown(vector.unseen)}`"
    client = ", then ".join(map(str, statuses)) or "nothing"
    return vector.name, f"{client} | {'closed' if closed else 'open'} | {backend}"


def _shown(data: bytes) -> str:
    return data.decode(errors="backslashreplace").strip()


async def observed_requests() -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The observed rows of requests by group, and the differences from the table."""
    rows: dict[str, list[tuple[str, str]]] = {}
    wrong: list[str] = []
    for group, vectors in TABLE.items():
        found: dict[int, Observed] = {}
        for limits in (FREE, HASTY):
            # In sequence: each proxy checks for leaks since its start.
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


async def observed_answers() -> tuple[list[tuple[str, str]], list[str]]:
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


async def observed() -> tuple[dict[str, list[tuple[str, str]]], list[tuple[str, str]], list[str]]:
    """The rows of requests by group, the rows of answers, and the differences from the table."""
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
