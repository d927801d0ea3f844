"""The arithmetic of the timed soak: slopes, and books that add up or say what does not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.endurance.ledger import End, Ledger, View, agree, left_over, second_half, since, slope_per_hour
from benchmarks.endurance.load import SoakRequests
from benchmarks.endurance.rig import MODELS, Rig
from llmproxy.config import load

WHOLE = View(End.WHOLE, 200)


# --- slopes -----------------------------------------------------------------------------------------------------------


def test_a_line_has_its_own_slope_wherever_its_time_begins() -> None:
    assert slope_per_hour([(7.0 + 10.0 * i, 50.0 + 2.0 * i) for i in range(9)]) == pytest.approx(720.0)


def test_what_only_goes_up_and_down_hardly_has_a_slope() -> None:
    assert slope_per_hour([(float(i), float(i % 2)) for i in range(1_000)]) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("samples", [[], [(1.0, 5.0)], [(1.0, 5.0), (1.0, 9.0)]])
def test_there_is_no_slope_without_two_times(samples: list[tuple[float, float]]) -> None:
    assert slope_per_hour(samples) == 0.0


def test_the_second_half_is_one_of_time_and_not_of_samples() -> None:
    samples = [(100.0, 1.0), (101.0, 2.0), (102.0, 3.0), (110.0, 4.0)]
    assert second_half(samples) == [(110.0, 4.0)]
    assert since(samples, 2.0) == [(102.0, 3.0), (110.0, 4.0)]
    assert second_half([]) == []


# --- who says what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "outcome", "status", "same"),
    [
        (WHOLE, "completed", 200, True),
        (WHOLE, "broken_stream", 200, False),
        (View(End.REFUSED, 503), "upstream_status", 503, True),
        (View(End.REFUSED, 503), "expired_no_backends", 503, True),
        (View(End.REFUSED, 503), "expired", 429, False),
        (View(End.REFUSED, 500), "internal", 500, False),
        (View(End.REFUSED, 200), "completed", 200, False),
        (View(End.BROKEN, 200), "broken_stream", 200, True),
        (View(End.BROKEN, 200), "completed", 200, False),
        (View(End.LEFT), "cancelled", 499, True),
        (View(End.LEFT), "completed", 200, True),
        (View(End.LEFT), "internal", 500, False),
        (View(End.LOST), "cancelled", 499, False),
        (View(End.LOST), "connect_failed", 502, False),
    ],
)
def test_what_a_client_saw_can_be_what_the_proxy_tells(view: View, outcome: str, status: int, same: bool) -> None:
    assert agree(view, outcome, status) is same


def entered(*requests: tuple[str, View | None, tuple[str, int] | None]) -> Ledger:
    """A ledger of requests: id, what the client saw, what the proxy logged."""
    ledger = Ledger()
    for request_id, view, logged in requests:
        ledger.send(request_id)
        if view is not None:
            ledger.end(request_id, view)
        if logged is not None:
            ledger.log(request_id, *logged)
    return ledger


def test_books_that_add_up_have_no_problems_whoever_speaks_first() -> None:
    ledger = entered(("a", WHOLE, ("completed", 200)), ("b", None, ("cancelled", 499)), ("c", View(End.UNSENT), None))
    ledger.end("b", View(End.LEFT))
    assert ledger.silent == 0
    assert ledger.closed({"completed": 1, "cancelled": 1, "internal": 0}) == []
    assert ledger.pairs == Counter({(End.WHOLE, "completed"): 1, (End.LEFT, "cancelled"): 1})


def test_a_request_that_the_proxy_never_logs_is_found() -> None:
    ledger = entered(("a", WHOLE, None))
    assert ledger.silent == 1
    assert any("never logged by the proxy" in problem for problem in ledger.closed({"completed": 1}))


def test_a_request_that_never_ends_for_its_client_is_found() -> None:
    (problem,) = entered(("a", None, ("completed", 200))).closed({"completed": 1})
    assert problem == "a: never ended for its client"


@pytest.mark.parametrize("view", [WHOLE, None])
def test_a_request_that_is_logged_twice_is_found(view: View | None) -> None:
    ledger = entered(("a", view, ("completed", 200)))
    ledger.log("a", "completed", 200)
    assert any("again" in problem for problem in ledger.problems)


def test_both_sides_that_contradict_each_other_are_found() -> None:
    (problem,) = entered(("a", WHOLE, ("cancelled", 499))).problems
    assert problem.startswith("a: cancelled 499")


def test_metrics_that_count_others_than_the_log_are_found() -> None:
    problems = entered(("a", WHOLE, ("completed", 200))).closed({"completed": 2})
    assert len(problems) == 2
    assert problems[1] == "1 requests sent, 2 outcomes counted"


def test_of_many_problems_the_first_are_listed_and_the_rest_are_counted() -> None:
    ledger = entered(*((str(number), WHOLE, ("cancelled", 499)) for number in range(50)))
    problems = ledger.closed({"cancelled": 50})
    assert len(problems) == 21
    assert problems[-1] == "and 30 more"


def test_only_what_there_is_more_of_is_left_over() -> None:
    assert left_over({"poll": 3, "watch": 1}, {"poll": 2, "watch": 1, "walk": 2}) == {"walk": 2}
    assert left_over({"poll": 3}, {"poll": 5}) == {"poll": 2}


# --- what is offered, and to whom -------------------------------------------------------------------------------------


def test_one_seed_is_one_order_of_requests_and_about_so_many_leave() -> None:
    requests, again = SoakRequests(7, leaves=0.05), SoakRequests(7, leaves=0.05)
    first = [requests.next() for _ in range(2_000)]
    assert first == [again.next() for _ in range(2_000)]
    assert 60 <= sum(request.leaves_after_s is not None for request in first) <= 140


def test_soak_configuration_is_valid_with_and_without_a_backend(tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{8001 + index}" for index in range(len(MODELS))]
    rig = Rig(tmp_path, None, urls, "http://127.0.0.1:8000")  # type: ignore[arg-type]
    rig.write()
    assert [backend.url for backend in load(rig.file).backends] == urls
    rig.write(without=[1], queue={"max_wait_s": 5.0})
    assert len(load(rig.file).backends) == len(MODELS) - 1
    assert json.loads(rig.file.read_text())["queue"] == {"max_wait_s": 5.0}
