"""The requests that are remembered: those of ten minutes, within a bound of bytes."""

from __future__ import annotations

from llmproxy.core.domain import Outcome, Waited
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.live.recent import BYTES_MAX, KEPT_S, RecentRequests
from llmproxy.observe.packed import INTEGER_MAX
from tests.exits import changed, exit_of


def _ended(request_id: str, ended_s: float, error: str = "") -> RequestExit:
    return exit_of(
        request_id=request_id,
        method="POST",
        path="/v1/completions",
        outcome=Outcome.COMPLETED,
        status=200,
        arrived_s=ended_s - 1.0,
        duration_s=1.0,
        error=error,
    )


def test_more_than_a_thousand_requests_are_found_for_ten_minutes_and_no_longer() -> None:
    recent = RecentRequests()
    for number in range(3_000):
        recent.record(_ended(str(number), 1.0 + number / 10))
    assert recent.find("0") == _ended("0", 1.0)
    recent.record(_ended("late", 1.5 + KEPT_S))
    assert recent.find("0") is None
    assert recent.find("9") is not None
    assert next(recent.newest_first()).request_id == "late"


def test_the_oldest_are_forgotten_earlier_where_they_are_too_large() -> None:
    recent, error = RecentRequests(), "e" * 2_000
    for number in range(BYTES_MAX // 2_000):
        recent.record(_ended(str(number), 1.0, error))
    assert recent.find("0") is None
    assert BYTES_MAX // 4_000 < sum(1 for _ in recent.newest_first()) < BYTES_MAX // 2_000


def test_the_newest_of_one_id_is_found() -> None:
    recent = RecentRequests()
    recent.record(_ended("one", 1.0))
    recent.record(_ended("one", 2.0))
    assert recent.find("one") == _ended("one", 2.0)


def test_texts_and_numbers_that_cannot_be_packed_are_kept_in_another_form() -> None:
    recent = RecentRequests()
    recent.record(changed(_ended("odd", 1.0), unknown_model="\ud800 é", error="\udcff", output_tokens=2**70))
    expected = changed(_ended("odd", 1.0), unknown_model="\\ud800 é", error="\\udcff", output_tokens=INTEGER_MAX)
    assert recent.find("odd") == expected


def test_a_refusal_whose_time_was_not_noted_is_as_old_as_the_request_before_it() -> None:
    recent = RecentRequests()
    recent.record(_ended("first", 1_000.0))
    recent.record(changed(_ended("refused", 1_000.0), arrived_s=None))
    recent.record(_ended("last", 1_000.0 + KEPT_S))
    assert [one.request_id for one in recent.newest_first()] == ["last", "refused", "first"]
    recent.record(_ended("later", 1_001.0 + KEPT_S))
    assert [one.request_id for one in recent.newest_first()] == ["later", "last"]


def test_why_a_request_waited_is_found_by_its_id_beside_its_end() -> None:
    recent, waited = RecentRequests(), Waited("no backend has room", ((0, "f", 2),))
    recent.left("one", waited, 1.0)
    recent.record(_ended("one", 1.0))
    assert recent.waited("one") == waited
    assert recent.find("one") == _ended("one", 1.0)
    assert [one.request_id for one in recent.newest_first()] == ["one"]
    assert recent.waited("two") is None
    recent.left("two", waited, 2.0 + KEPT_S)
    assert (recent.waited("one"), recent.find("one")) == (None, None)
