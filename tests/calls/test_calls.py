"""The table of the documentation has the Python calls of a request. A change that makes more calls must change it."""

from __future__ import annotations

import sys

from tests.calls.measure import CASES, PAGE, REGION, measured, shown

MEASURED_WITH = (3, 11)
"""The Python of the table. Later ones make fewer calls, because they inline comprehensions."""


def test_requests_make_as_many_calls_as_documented() -> None:
    table, found = REGION.search(PAGE.read_text()), measured()
    assert table is not None
    if shown(found) != table[2].strip():
        # On a busy machine, a chunk can arrive in two reads, which costs a call.
        found = measured()
    hint = f"`make calls` writes the table of {PAGE.name}; more calls cost every request 0.5 µs each"
    if sys.version_info[:2] == MEASURED_WITH:
        assert shown(found) == table[2].strip(), hint
    sums = [int(cell) for cell in table[2].strip().rpartition("**sum** |")[2].split("|")[:-1]]
    assert [sum_ for sum_, case in zip(sums, CASES, strict=True) if found[case].total() > sum_] == [], hint
