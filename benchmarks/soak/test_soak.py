"""The arithmetic of the soak: slopes, and a ledger that adds up or lists its problems."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.soak.fleet import SETTINGS
from benchmarks.soak.ledger import End, Ledger, View, agree, left_over, second_half, slope_per_hour
from benchmarks.soak.load import SoakRequests
from llmproxy.config import Config

WHOLE = View(End.WHOLE, 200)


# --- slopes -----------------------------------------------------------------------------------------------------------


def test_slope_of_a_line_does_not_depend_on_the_time_of_its_begin() -> None:
    assert slope_per_hour([(7.0 + 10.0 * i, 50.0 + 2.0 * i) for i in range(9)]) == pytest.approx(720.0)


def test_values_that_go_up_and_down_have_nearly_no_slope() -> None:
    assert slope_per_hour([(float(i), float(i % 2)) for i in range(1_000)]) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("samples", [[], [(1.0, 5.0)], [(1.0, 5.0), (1.0, 9.0)]])
def test_there_is_no_slope_without_two_times(samples: list[tuple[float, float]]) -> None:
    assert slope_per_hour(samples) == 0.0


def test_second_half_is_half_of_the_time_and_not_of_the_samples() -> None:
    samples = [(100.0, 1.0), (101.0, 2.0), (102.0, 3.0), (110.0, 4.0)]
    assert second_half(samples) == [(110.0, 4.0)]
    assert second_half([]) == []


# --- client and proxy -------------------------------------------------------------------------------------------------


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
def test_view_of_a_client_fits_the_log_line(view: View, outcome: str, status: int, same: bool) -> None:
    assert agree(view, outcome, status) is same


def entered(*requests: tuple[str, View | None, tuple[str, int] | None]) -> Ledger:
    """A ledger of requests: id, the view of the client, outcome and status in the log."""
    ledger = Ledger()
    for request_id, view, logged in requests:
        ledger.send(request_id)
        if view is not None:
            ledger.end(request_id, view)
        if logged is not None:
            ledger.log(request_id, *logged)
    return ledger


def test_ledger_that_adds_up_has_no_problems_in_any_order() -> None:
    ledger = entered(("a", WHOLE, ("completed", 200)), ("b", None, ("cancelled", 499)), ("c", View(End.UNSENT), None))
    ledger.end("b", View(End.LEFT))
    assert ledger.silent == 0
    assert ledger.closed({"completed": 1, "cancelled": 1, "internal": 0}) == []
    assert ledger.pairs == Counter({(End.WHOLE, "completed"): 1, (End.LEFT, "cancelled"): 1})


def test_missing_log_line_is_a_problem() -> None:
    ledger = entered(("a", WHOLE, None))
    assert ledger.silent == 1
    assert any("never logged by the proxy" in problem for problem in ledger.closed({"completed": 1}))


def test_request_without_an_end_for_its_client_is_a_problem() -> None:
    (problem,) = entered(("a", None, ("completed", 200))).closed({"completed": 1})
    assert problem == "a: never ended for its client"


@pytest.mark.parametrize("view", [WHOLE, None])
def test_second_log_line_is_a_problem(view: View | None) -> None:
    ledger = entered(("a", view, ("completed", 200)))
    ledger.log("a", "completed", 200)
    assert any("again" in problem for problem in ledger.problems)


def test_contradiction_between_client_and_proxy_is_a_problem() -> None:
    (problem,) = entered(("a", WHOLE, ("cancelled", 499))).problems
    assert problem.startswith("a: logged as cancelled 499")


def test_contradiction_between_metrics_and_log_is_a_problem() -> None:
    problems = entered(("a", WHOLE, ("completed", 200))).closed({"completed": 2})
    assert len(problems) == 2
    assert problems[1] == "1 requests sent, 2 outcomes counted"


def test_problems_beyond_the_first_are_counted() -> None:
    ledger = entered(*((str(number), WHOLE, ("cancelled", 499)) for number in range(50)))
    problems = ledger.closed({"cancelled": 50})
    assert len(problems) == 21
    assert problems[-1] == "and 30 more"


def test_leftovers_are_larger_counts_than_before() -> None:
    assert left_over({"poll": 3, "watch": 1}, {"poll": 2, "watch": 1, "walk": 2}) == {"walk": 2}
    assert left_over({"poll": 3}, {"poll": 5}) == {"poll": 2}


# --- load and fleet ---------------------------------------------------------------------------------------------------


def test_seed_gives_the_order_of_requests_and_a_share_of_clients_leaves() -> None:
    requests, again = SoakRequests(7, leaves=0.05), SoakRequests(7, leaves=0.05)
    first = [requests.next() for _ in range(2_000)]
    assert first == [again.next() for _ in range(2_000)]
    assert 60 <= sum(request.leaves_after_s is not None for request in first) <= 140


def test_settings_of_the_soak_are_valid() -> None:
    config = Config.model_validate({"backends": [{"url": "http://127.0.0.1:8001"}], **SETTINGS})
    assert [tenant.name for tenant in config.tenants] == ["desk", "app", "batch"]
