from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, AdmissionKind, Grant, Preempt, Verdict
from llmproxy.core.lease_events import Committed, LeaseEvent, Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.preemption import LOOK_MAX, PREEMPT_MAX
from llmproxy.core.settings import Settings, UsageLimit
from tests.core.make import DEFAULTS, grants, listing, only_grant, pools, reading, request, submit, tight

TIGHT = tight(ceilings={DEFAULT: 1.0})


def full(
    slots: int = 1, band: int = SHEDDABLE, settings: Settings = TIGHT, stream: bool = True, limit: int | None = None
) -> tuple[Pools, list[Grant]]:
    """A backend filled with requests of `band`, with the batch limit `limit`."""
    of = pools({"a": limit or slots}, settings)
    for number in range(slots):
        of.submit(request(id=f"low{number}", band=band, stream=stream, flow="low", arrived_s=number / 100), 1.0)
    return of, grants(of, 1.0)


def taken_back(of: Pools, now: float = 2.0) -> list[str]:
    """Returns the requests that the next pass preempts; it may decide nothing else."""
    decisions = of.decide(now)
    of.check(now)
    assert of.decide(now) == []
    assert all(isinstance(decision, Preempt) for decision in decisions)
    return [decision.request.id for decision in decisions]


def urgent(of: Pools, count: int = 1, band: int = CRITICAL, now: float = 2.0) -> None:
    submit(of, *(request(band=band, flow="urgent", arrived_s=now) for _ in range(count)), now=now)


STAYS = [(DEFAULT, CRITICAL), (SHEDDABLE, DEFAULT), (SHEDDABLE, -50), (7, CRITICAL)]
GIVES_WAY = [(-1, 1), (SHEDDABLE, 1), (-1, CRITICAL)]


@pytest.mark.parametrize(("low", "high"), STAYS + GIVES_WAY)
def test_only_bands_below_default_are_preempted_by_bands_above_it(low: int, high: int) -> None:
    of, _ = full(band=low)
    urgent(of, band=high)
    assert taken_back(of) == (["low0"] if (low, high) in GIVES_WAY else [])


@pytest.mark.parametrize("event", [Started, Committed])
def test_request_with_a_token_or_byte_sent_is_never_preempted(event: type[LeaseEvent]) -> None:
    of, (low,) = full()
    of.apply(event(low.lease), 1.5)
    urgent(of)
    assert taken_back(of) == []


def test_a_lease_that_answers_after_preemption_is_replaced_by_another() -> None:
    of, (older, newer) = full(2)
    urgent(of)
    assert taken_back(of) == ["low1"]
    of.apply(Started(newer.lease), 2.1)
    assert taken_back(of, 2.1) == ["low0"]
    of.apply(Returned(older.lease, Verdict.PREEMPTED), 2.2)


def test_the_lowest_band_is_preempted_first() -> None:
    of = pools({"a": LOOK_MAX + 1}, TIGHT)
    of.submit(request(id="low", band=SHEDDABLE, stream=True, flow="low", arrived_s=0.0), 1.0)
    of.decide(1.0)
    for number in range(LOOK_MAX):
        of.submit(request(id=f"above{number}", band=-1, stream=True, flow="above", arrived_s=0.5), 1.0)
    of.decide(1.0)
    urgent(of)
    assert taken_back(of) == ["low"]


def test_only_so_many_are_outstanding_at_a_time() -> None:
    of, held = full(PREEMPT_MAX + 4)
    urgent(of, PREEMPT_MAX + 4)
    assert len(taken_back(of)) == PREEMPT_MAX
    of.apply(Returned(held[-1].lease, Verdict.PREEMPTED), 3.0)
    of.submit(held[-1].request, 3.0, entry=AdmissionKind.PREEMPTED)
    granted, *more = of.decide(3.0)
    assert isinstance(granted, Grant)
    assert granted.request.band == CRITICAL
    assert [type(decision) for decision in more] == [Preempt]


def test_settings_turn_it_off() -> None:
    of, _ = full(settings=tight(ceilings={DEFAULT: 1.0}, preemption=False))
    urgent(of)
    assert taken_back(of) == []


def test_nothing_is_taken_back_while_there_is_room() -> None:
    capacity = replace(DEFAULTS.capacity, look_ahead=1, prompt_window_s=None)
    of, _ = full(settings=replace(DEFAULTS, ceilings={CRITICAL: 1.0, SHEDDABLE: 0.5}, capacity=capacity))
    urgent(of)
    only_grant(of, 2.0)


def test_nothing_is_taken_back_where_that_makes_no_room() -> None:
    of = pools({"a": 1}, TIGHT)
    of.submit(request(band=SHEDDABLE, stream=True), 0.0)
    of.decide(0.0)
    # Sequences of another client fill the engine too.
    of.backends["a"].observe(reading(1.0, running=8))
    of.backends["a"].observe(reading(1.5, running=8))
    urgent(of)
    assert taken_back(of) == []


def test_nothing_is_preempted_on_a_backend_that_cannot_serve_the_head() -> None:
    fleet = {"base": listing(max_model_len=100), "lora": listing("x", max_model_len=1000)}
    for head in (request(band=CRITICAL, adapter="x"), request(band=CRITICAL, prompt_tokens=500)):
        of = pools({"base": 1, "lora": 1}, TIGHT, listings=fleet)
        of.submit(request(band=SHEDDABLE, adapter="x", stream=True), 0.0)
        (on_lora,) = of.decide(0.0)
        of.submit(request(band=SHEDDABLE, stream=True), 0.0)
        of.decide(0.0)
        of.submit(head, 2.0)
        (back,) = of.decide(2.0)
        assert isinstance(on_lora, Grant)
        assert isinstance(back, Preempt)
        assert (back.lease, back.backend) == (on_lora.lease, "lora")
        assert of.decide(2.0) == []


def test_nothing_is_taken_back_from_a_backend_that_failed_the_head() -> None:
    of = pools({"a": 1, "b": 1}, TIGHT)
    submit(of, *(request(band=SHEDDABLE, stream=True) for _ in range(2)))
    of.decide(0.0)
    of.submit(request(band=CRITICAL), 2.0, frozenset({"a"}), AdmissionKind.RETRY)
    (back,) = of.decide(2.0)
    assert isinstance(back, Preempt)
    assert back.backend == "b"


# --- without a stream -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "readings", "taken"),
    [
        pytest.param(1, [], [], id="no proof that it waits"),
        pytest.param(3, [(1.5, 2, 1)], ["low2"], id="one waits, and it can only be the last"),
        pytest.param(2, [(1.5, 2, 0), (1.8, 1, 1)], [], id="running requests of the reading stay"),
        pytest.param(1, [(0.9, 0, 1)], [], id="a reading older than the booking"),
        pytest.param(1, [(1.5, 0, 4), (1.6, 0, 4)], [], id="those of other clients wait"),
    ],
)
def test_a_reading_proves_which_plain_requests_wait_in_the_engine(
    slots: int, readings: list[tuple[float, int, int]], taken: list[str]
) -> None:
    of, _ = full(slots, stream=False)
    urgent(of, slots)
    for at_s, running, waiting in readings:
        of.backends["a"].observe(reading(at_s, running=running, waiting=waiting))
    assert taken_back(of) == taken


def test_a_plain_request_of_several_sequences_counts_with_all_of_them() -> None:
    of = pools({"a": 6}, TIGHT)
    for number, sequences in enumerate((1, 1, 4)):
        of.submit(request(id=f"low{number}", band=SHEDDABLE, sequences=sequences, arrived_s=number / 100), 1.0)
    of.decide(1.0)
    urgent(of, 3)
    of.backends["a"].observe(reading(1.5, running=3, waiting=3))
    assert taken_back(of) == [], "of the last one, a sequence runs; those before it run all the more"
    of.backends["a"].observe(reading(1.6, running=2, waiting=4))
    assert taken_back(of) == ["low2"]


# --- nothing is lost by it --------------------------------------------------------------------------------------------


def test_preempted_request_returns_first_in_its_flow() -> None:
    of, held = full(2)
    of.submit(request(id="older", band=SHEDDABLE, flow="low", arrived_s=0.0), 1.5)
    urgent(of, 2)
    assert taken_back(of) == ["low1", "low0"]
    for one in reversed(held):
        of.apply(Returned(one.lease, Verdict.PREEMPTED), 2.1)
        of.submit(one.request, 2.1, entry=AdmissionKind.PREEMPTED)
    served = grants(of, 2.1)
    assert [grant.request.band for grant in served] == [CRITICAL] * 2
    back: list[str] = []
    while served:
        of.apply(Returned(served.pop().lease, Verdict.SERVED), 3.0)
        served += grants(of, 3.0)
        back += [grant.request.id for grant in served[-1:] if grant.request.band == SHEDDABLE]
    assert back == ["low0", "low1", "older"]


def test_a_preempted_attempt_costs_nothing() -> None:
    of, (low,) = full()
    assert of.balances()["base", SHEDDABLE]["low"] == 30.0
    urgent(of)
    taken_back(of)
    of.apply(Returned(low.lease, Verdict.PREEMPTED), 2.1)
    assert of.balances()["base", SHEDDABLE]["low"] == 0.0
    of.submit(low.request, 2.1, entry=AdmissionKind.PREEMPTED)
    of.check(2.1)


def test_a_preempted_request_keeps_its_deadline_and_passes_a_full_queue() -> None:
    of, (low,) = full(settings=tight(ceilings={DEFAULT: 1.0}, queue=replace(DEFAULTS.queue, requests_max=1)))
    urgent(of)
    assert taken_back(of) == ["low0"]
    of.apply(Returned(low.lease, Verdict.PREEMPTED), 2.1)
    of.submit(low.request, 2.1, entry=AdmissionKind.PREEMPTED)
    of.decide(2.1)
    assert of.next_wakeup(2.1) == low.request.deadline_s


def test_leases_that_only_help_together_are_preempted_in_one_pass() -> None:
    of = pools({"a": 6}, TIGHT)
    for name, sequences in (("wide", 4), ("newest", 1)):
        of.submit(request(id=name, band=SHEDDABLE, sequences=sequences, stream=True), 0.0)
    of.decide(0.0)
    # With three sequences of other clients there are 8, and 5 may stay.
    for at in (1.0, 1.5):
        of.backends["a"].observe(reading(at, running=8))
    urgent(of, 2)
    assert taken_back(of) == ["wide", "newest"]


def overfilled(of_them: int = 2, stream: bool = True) -> tuple[Pools, list[Grant]]:
    """A backend with twice the assumed batch limit of its load, and `of_them` waiting at the last reading."""
    of, held = full(8, stream=stream, limit=16)
    of.backends["a"].observe(reading(1.5, running=8 - of_them, waiting=of_them))
    return of, held


@pytest.mark.parametrize("stream", [True, False])
def test_a_lease_in_an_engines_queue_is_preempted_despite_seeming_room(stream: bool) -> None:
    of, held = overfilled(stream=stream)
    urgent(of)
    granted, *preempted = of.decide(2.0)
    assert isinstance(granted, Grant)
    assert [(type(one), one.request.id) for one in preempted] == [(Preempt, "low7"), (Preempt, "low6")]
    assert of.decide(2.0) == []
    of.apply(Returned(held[7].lease, Verdict.PREEMPTED), 2.2)
    of.submit(held[7].request, 2.2, entry=AdmissionKind.PREEMPTED)
    # It does not return to the backend, behind the request that preempted it.
    assert of.decide(2.2) == []
    of.backends["a"].observe(reading(2.5, running=7, waiting=0))
    assert only_grant(of, 2.6).request.id == "low7"


def test_requests_are_preempted_only_while_the_higher_one_waits() -> None:
    of, _ = overfilled(of_them=0)
    urgent(of)
    (critical,) = grants(of, 2.0)
    of.submit(request(id="late", band=SHEDDABLE, stream=True, flow="low"), 2.0)
    of.decide(2.0)
    of.backends["a"].observe(reading(2.5, running=8, waiting=2))
    assert taken_back(of, 2.5) == []
    of.backends["a"].observe(reading(2.6, running=7, waiting=3))
    assert taken_back(of, 2.6) == ["low7"]
    of.apply(Started(critical.lease), 2.7)
    of.backends["a"].observe(reading(2.8, running=4, waiting=6))
    assert taken_back(of, 2.8) == []


def test_nothing_is_preempted_without_an_engine_queue_or_when_off() -> None:
    of, _ = overfilled(of_them=0)
    urgent(of)
    of.decide(2.0)
    assert taken_back(of, 2.1) == []
    of, _ = overfilled()
    of.reconfigure(replace(DEFAULTS, ceilings={DEFAULT: 1.0}, preemption=False), {}, 1.6)
    urgent(of)
    of.decide(2.0)
    assert taken_back(of, 2.1) == []


def test_nothing_is_preempted_for_a_request_at_its_usage_limit() -> None:
    settings = replace(DEFAULTS, limits={"t": UsageLimit(in_flight=1)})
    of = pools({"a": 1, "b": 1, "c": 1}, settings)
    submit(of, request(id="above", band=CRITICAL), request(id="first", band=7, limits=("t",)), now=1.0)
    above, first = grants(of, 1.0)
    of.apply(Started(first.lease), 1.1)
    of.apply(Returned(above.lease, Verdict.SERVED), 1.2)
    of.submit(request(id="low", band=SHEDDABLE), 1.3)
    assert [one.request.id for one in of.decide(1.3)] == ["low"]
    of.submit(request(id="second", band=7, limits=("t",)), 1.4)
    assert of.decide(1.4) == []
    assert of.blocked() == {"t": 1}
    of.apply(Returned(first.lease, Verdict.SERVED), 1.5)
    assert [one.request.id for one in of.decide(1.5)] == ["second"]
