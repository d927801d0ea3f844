"""The load of one backend: its uncomputed prompts, and learning from its first bytes."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import exp, log
from random import Random

import pytest

from llmproxy.core.domain import Request, Slo
from llmproxy.core.placement.backend_load import (
    MARGIN,
    OVERDUE,
    RATION_S,
    SAME_STEP_S,
    SHARE_MIN,
    STRETCH_PROMPTS,
    WORK_S,
    BackendLoad,
    InFlight,
)
from llmproxy.core.placement.rates import PoolRates
from tests.core.make import request

TOKEN_S = 1 / 15_000
"""The assumed seconds per prompt token, and BASE_S of each stretch of work. Attention takes no time here."""
BASE_S = 0.03


class LoadBench:
    """A `BackendLoad`, the rates of its pool, and the time."""

    def __init__(self) -> None:
        self.rates = PoolRates(attention=0.0)
        self.backend_load = BackendLoad()
        self.now = 100.0
        self._flights: dict[int, InFlight] = {}

    def book(
        self, tokens: float = 1_000.0, cold: bool = False, stream: bool = True, asked: Request | None = None
    ) -> int:
        lease = len(self._flights) + 1
        asked = asked or request(stream=stream, adapter=f"cold-{lease}" if cold else None)
        flight = self._flights[lease] = InFlight(
            asked, "a", self.backend_load, self.now, tokens, 0.0, cold, 0.1, 0.01, fetched=False
        )
        self.backend_load.book(lease, flight, self.rates, self.now)
        return lease

    def start(self, lease: int, after_s: float = 0.0) -> None:
        self.now += after_s
        self.backend_load.start(lease, self._flights[lease], self.rates, self.now)

    def finish(self, *leases: int) -> None:
        for lease in leases:
            self.backend_load.finish(lease, self._flights[lease], self.now)

    def queue_s(self) -> float:
        return self.backend_load.queue_s(self.rates, self.now)

    def learned(self) -> tuple[float, float, float, float]:
        prefill = self.rates.prefill
        return prefill.base, prefill.slope, self.backend_load.prefill.factor, self.rates.loads.coldest_s


def first_bytes(leases: Iterable[int], bench: LoadBench, after_s: float) -> None:
    """All in one step, which ends `after_s` from now."""
    for number, lease in enumerate(leases):
        bench.start(lease, SAME_STEP_S / 10 if number else after_s)


# --- the share of time that prompts may have ---------------------------------------------------------------------


def crowded(tpot_s: float | None = 0.03) -> tuple[LoadBench, int]:
    """A backend with a stream that has begun, which was given prompts of 6 s within no time: six tenths of 10 s."""
    bench = LoadBench()
    begun = bench.book(0.0, asked=request(stream=True, slo=None if tpot_s is None else Slo(tpot_s=tpot_s)))
    bench.start(begun, BASE_S)
    bench.book(90_000)
    return bench, begun


def opens_in_s(bench: LoadBench, ceiling: float = 1.0, band: int = 0) -> float:
    return bench.backend_load.rationed_until(bench.rates, band, ceiling, bench.now) - bench.now


def test_without_an_objective_prompts_may_have_all_the_time() -> None:
    bench, _ = crowded(tpot_s=None)
    assert opens_in_s(bench) == 0.0


def test_prompts_may_have_the_time_that_the_objective_leaves() -> None:
    bench, _ = crowded(tpot_s=0.03)
    # Decoding takes 0.0102 s, and streams are kept to 0.027 s: that leaves 0.62 for prompts.
    assert opens_in_s(bench) == 0.0
    bench.book(15_000)
    wait_s = RATION_S * log(0.7 / (1.0 - 0.0103 / (MARGIN * 0.03)))
    assert opens_in_s(bench) == pytest.approx(wait_s, rel=1e-3)
    bench.now += wait_s + 0.01
    assert opens_in_s(bench) == 0.0
    bench.backend_load.step.factor = 2.0
    assert opens_in_s(bench) > 0.0, "a slow backend has less time for them"


def test_ceiling_leaves_a_part_of_that_time_to_higher_bands() -> None:
    bench, _ = crowded(tpot_s=0.03)
    assert opens_in_s(bench, ceiling=0.85) > 0.0
    assert opens_in_s(bench, ceiling=0.99) == 0.0


def test_mean_bound_of_the_streams_counts_until_they_end() -> None:
    bench, begun = crowded(tpot_s=0.02)
    tight_s = opens_in_s(bench)
    loose = [bench.book(0.0, asked=request(stream=True, slo=Slo(tpot_s=tpot_s))) for tpot_s in (0.04, 1e9)]
    assert tight_s > 0.0 == opens_in_s(bench), "their bounds are 0.43, 0.72 and 1"
    bench.finish(*loose)
    assert opens_in_s(bench) == pytest.approx(tight_s)
    bench.finish(begun)
    assert opens_in_s(bench) == 0.0


def test_prompts_are_rationed_by_streams_of_their_band_and_above() -> None:
    bench, _ = crowded(tpot_s=0.02)
    assert opens_in_s(bench, band=1) == 0.0
    tight_s = opens_in_s(bench)
    assert tight_s > 0.0
    bench.book(0.0, asked=request(stream=True, band=-1, slo=Slo(tpot_s=1.0)))
    assert opens_in_s(bench, band=-1) == pytest.approx(tight_s, rel=0.1), "no band has more than a higher one"
    bench.book(0.0, asked=request(stream=True, band=1, slo=Slo(tpot_s=0.015)))
    assert opens_in_s(bench, band=1) > tight_s


def test_answer_without_a_stream_rations_nothing() -> None:
    bench = LoadBench()
    bench.book(0.0, asked=request(slo=Slo(tpot_s=0.02)))
    bench.book(150_000)
    assert opens_in_s(bench) == 0.0


def test_objective_that_decoding_alone_misses_rations_nothing() -> None:
    bench = LoadBench()
    bench.start(bench.book(0.0, asked=request(stream=True, slo=Slo(tpot_s=0.011))), BASE_S)
    bench.book(150_000)
    assert opens_in_s(bench) == 0.0


def test_some_prompts_go_however_narrow_the_objective() -> None:
    bench = LoadBench()
    bench.start(bench.book(0.0, asked=request(stream=True, slo=Slo(tpot_s=0.0115))), BASE_S)
    bench.book(SHARE_MIN * RATION_S * 15_000 - 1.0)
    assert opens_in_s(bench) == 0.0
    bench.book(15.0)
    assert opens_in_s(bench) > 0.0


def test_prompt_that_was_not_computed_gives_its_time_back() -> None:
    bench, _ = crowded(tpot_s=0.02)
    before_s = opens_in_s(bench)
    taken_back = bench.book(30_000)
    bench.now += 1.0
    assert opens_in_s(bench) > before_s
    bench.finish(taken_back)
    assert opens_in_s(bench) == pytest.approx(before_s - 1.0)


def test_prompt_left_while_it_is_computed_keeps_its_time() -> None:
    bench = LoadBench()
    bench.start(bench.book(0.0, asked=request(stream=True, slo=Slo(tpot_s=0.02))), BASE_S)
    bench.book(90_000)
    bench.now += 4.0
    bench.finish(2)
    assert bench.backend_load._prompts.at(bench.now) == pytest.approx(0.4 * exp(-0.4))


# --- the queue --------------------------------------------------------------------------------------------------------


def test_idle_backend_has_a_queue_of_the_base_time() -> None:
    assert LoadBench().queue_s() == pytest.approx(BASE_S)


def test_queue_grows_with_bookings_and_shrinks_with_time() -> None:
    bench = LoadBench()
    bench.book(3_000)
    bench.book(1_500)
    assert bench.queue_s() == pytest.approx(BASE_S + 4_500 * TOKEN_S)
    bench.now += 0.1
    assert bench.queue_s() == pytest.approx(BASE_S + 4_500 * TOKEN_S - 0.1)
    # No more of the oldest can be done than there is.
    bench.now += 0.2
    assert bench.queue_s() == pytest.approx(BASE_S + 1_500 * TOKEN_S)


def test_next_prompt_begins_at_the_first_byte_of_the_previous_one() -> None:
    bench = LoadBench()
    first = bench.book(3_000)
    bench.book(3_000)
    bench.start(first, 0.23)
    assert bench.queue_s() == pytest.approx(BASE_S + 3_000 * TOKEN_S)
    bench.now += 0.05
    assert bench.queue_s() == pytest.approx(BASE_S + 3_000 * TOKEN_S - 0.05)


def test_request_that_ends_before_its_first_byte_leaves_the_queue() -> None:
    bench = LoadBench()
    bench.finish(bench.book(3_000), bench.book(3_000))
    assert bench.queue_s() == pytest.approx(BASE_S)


def test_overdue_first_byte_lengthens_the_queue_by_its_lateness() -> None:
    bench = LoadBench()
    stuck = bench.book(3_000)
    bench.now += OVERDUE * (BASE_S + 3_000 * TOKEN_S)
    assert bench.queue_s() == pytest.approx(BASE_S)
    bench.now += 20.0
    assert bench.queue_s() == pytest.approx(BASE_S + 20.0)
    bench.finish(stuck)
    assert bench.queue_s() == pytest.approx(BASE_S)


def test_prompt_behind_others_is_due_later() -> None:
    bench = LoadBench()
    first = bench.book(15_000)
    bench.book(1_500)
    bench.start(first, 1.0)
    bench.now += 1.0
    assert bench.queue_s() < 0.1
    bench.now += 1.0
    assert bench.queue_s() > 0.5


def test_prompt_on_a_slow_backend_is_due_later() -> None:
    bench = LoadBench()
    bench.backend_load.prefill.factor = 2.0
    bench.book(3_000)
    bench.now += 1.5 * OVERDUE * (BASE_S + 3_000 * TOKEN_S)
    assert bench.queue_s() == pytest.approx(2.0 * BASE_S)


def test_answer_without_a_stream_is_never_overdue() -> None:
    bench = LoadBench()
    plain = bench.book(3_000, stream=False)
    bench.book(1_500, stream=False)
    bench.now += 0.3
    assert bench.queue_s() == pytest.approx(BASE_S + 1_500 * TOKEN_S)
    bench.now += 50.0
    assert bench.queue_s() == pytest.approx(BASE_S)
    bench.start(plain)
    bench.finish(plain)
    assert bench.queue_s() == pytest.approx(BASE_S)


def test_a_backend_of_half_the_pace_has_a_queue_of_twice_the_time() -> None:
    bench = LoadBench()
    bench.backend_load.prefill.factor = 2.0
    bench.book(3_000)
    assert bench.queue_s() == pytest.approx(2.0 * (BASE_S + 3_000 * TOKEN_S))


# --- how busy it is ---------------------------------------------------------------------------------------------------


def test_busy_share_is_measured_and_forgotten() -> None:
    bench = LoadBench()
    assert bench.backend_load.busy_share.at(bench.now) == 0.0
    for _ in range(400):
        bench.now += 0.5
        bench.book(0.5 * 0.4 / TOKEN_S)
    share = bench.backend_load.busy_share.at(bench.now)
    assert share == pytest.approx(0.4, rel=0.05)
    assert bench.backend_load.busy_share.at(bench.now + WORK_S) == pytest.approx(share / 2.718, rel=0.01)
    assert bench.backend_load.busy_share.at(bench.now + 10 * WORK_S) < 1e-4


def test_a_backend_may_be_given_more_than_it_can_do() -> None:
    bench = LoadBench()
    for _ in range(400):
        bench.now += 0.5
        bench.book(0.5 * 1.5 / TOKEN_S)
    assert bench.backend_load.busy_share.at(bench.now) == pytest.approx(1.5, rel=0.05)


def test_the_same_prompts_keep_a_slow_backend_busier() -> None:
    usual, slow = LoadBench(), LoadBench()
    slow.backend_load.prefill.factor = 2.0
    for bench in (usual, slow):
        bench.book(3_000)
    assert slow.backend_load.busy_share.at(100.0) == pytest.approx(2.0 * usual.backend_load.busy_share.at(100.0))


# --- what first bytes teach -------------------------------------------------------------------------------------------


def test_prompts_are_learned_together_until_none_is_left() -> None:
    """The step that ends the first prompt computes a half of the second one, whose tokens are many or few."""
    bench = LoadBench()
    for i in range(1_200):
        first, second = 200.0 * (1 + i % 9), 100.0 * (1 + i % 7) ** 2
        pair = [bench.book(first), bench.book(second)]
        bench.start(pair[0], 0.05 + (first + second / 2) / 5_000)
        bench.start(pair[1], second / 2 / 5_000)
        bench.finish(*pair)
        bench.now += 60.0
    assert bench.learned()[:2] == pytest.approx((0.05, 1 / 5_000), rel=0.02)
    assert bench.learned()[2] == pytest.approx(1.0, abs=0.01)


def test_backend_that_always_has_prompts_is_learned_too() -> None:
    bench = LoadBench()
    untaught = bench.learned()
    lease = bench.book()
    for _ in range(STRETCH_PROMPTS):
        behind = bench.book()
        bench.start(lease, 0.5)
        lease = behind
        assert bench.learned() == untaught
    bench.start(lease, 0.5)
    assert bench.learned() != untaught
    for _ in range(100 * STRETCH_PROMPTS):
        behind = bench.book()
        bench.start(lease, 0.5)
        lease = behind
    took_s = bench.rates.prefill.at(STRETCH_PROMPTS * 1_000.0) * bench.backend_load.prefill.factor
    assert took_s == pytest.approx(STRETCH_PROMPTS * 0.5, rel=0.02)


def test_first_bytes_of_one_step_are_learned_together() -> None:
    bench = LoadBench()
    before_s = bench.rates.prefill.at(1_000.0)
    for i in range(600):
        together = [bench.book(500.0 * (1 + (i + n) % 3)) for n in range(4)]
        tokens = sum(500.0 * (1 + (i + n) % 3) for n in range(4))
        first_bytes(together, bench, 0.03 + tokens * TOKEN_S)
        bench.finish(*together)
        bench.now += 1.0
    assert bench.rates.prefill.at(1_000.0) == pytest.approx(before_s, rel=0.02)
    assert bench.backend_load.prefill.factor == 1.0


def test_prompt_that_waited_for_a_batch_slot_teaches_nothing() -> None:
    bench = LoadBench()
    bench.backend_load.limit = 2
    untaught = bench.learned()
    leases = [bench.book(1_000) for _ in range(4)]
    for lease in leases[:3]:
        bench.start(lease, 0.5)
    taught = bench.learned()
    assert taught != untaught
    bench.start(leases[3], 0.5)
    assert bench.learned() == taught


def test_a_step_says_nothing_before_the_next_one_began() -> None:
    bench = LoadBench()
    untaught = bench.learned()
    first_bytes([bench.book(), bench.book()], bench, 1.0)
    assert bench.learned() == untaught
    bench.start(bench.book(), 1.0)
    assert bench.learned() != untaught


def test_step_with_a_cold_adapter_teaches_no_prompt_time() -> None:
    bench = LoadBench()
    base, slope, factor, _ = bench.learned()
    for cold_first in (True, False) * 30:
        pair = [bench.book(cold=cold_first), bench.book(cold=not cold_first)]
        first_bytes(pair, bench, BASE_S + 2_000 * TOKEN_S + 0.7)
        bench.finish(*pair)
        bench.now += 1.0
    assert bench.learned()[:3] == (base, slope, factor)
    assert bench.rates.loads.coldest_s == pytest.approx(0.7, rel=0.1)


def test_steps_before_and_after_a_cold_adapter_are_learned_apart() -> None:
    bench = LoadBench()
    untaught = bench.learned()
    before, cold, after = bench.book(), bench.book(cold=True), bench.book()
    bench.start(before, 3.0)
    bench.start(cold, 1.0)
    prompt = bench.learned()
    assert prompt[:3] != untaught[:3]
    bench.start(after, 1.0)
    assert bench.learned()[:3] == prompt[:3]
    assert bench.learned()[3] != prompt[3]


@pytest.mark.parametrize("plain_share", [0.0, 0.3, 0.8])
def test_answers_without_a_stream_do_not_mislead_streams(plain_share: float) -> None:
    """Prompts are computed one after the other. Non-streamed requests have their first byte two seconds later."""
    rng, bench = Random(2), LoadBench()
    token_s, base_s = 1 / 8_000, 0.04
    events: list[tuple[float, int]] = []
    came_s = free_s = 0.0
    for _ in range(2_000):
        came_s += rng.expovariate(3.0)
        heappush(events, (came_s, 0))
    while events:
        bench.now, lease = heappop(events)
        if lease:
            bench.start(lease)
            bench.finish(lease)
            continue
        bench.queue_s()
        tokens, plain = rng.choice((200.0, 1_000.0, 4_000.0)), rng.random() < plain_share
        lease = bench.book(tokens, stream=not plain)
        free_s = (free_s if free_s > bench.now else bench.now + base_s) + tokens * token_s
        heappush(events, (free_s + 2.0 * plain, lease))
    # Only what begins on an idle backend takes the base, and where some show no byte, fewer stretches seem to.
    assert 0.0 < bench.rates.prefill.base < 1.02 * base_s
    assert bench.rates.prefill.slope == pytest.approx(token_s, rel=0.05)


def test_prompt_that_ended_unseen_spoils_the_next_first_byte_and_no_other() -> None:
    bench = LoadBench()
    untaught = bench.learned()
    gone, stays, behind = bench.book(9_000), bench.book(), bench.book()
    bench.now += 0.3
    bench.finish(gone)
    bench.start(stays, 0.4)
    bench.start(behind, 1.0)
    assert bench.learned() == untaught
    bench.book()
    assert bench.learned() != untaught


def test_prompt_that_ended_unseen_is_forgotten_on_an_idle_backend() -> None:
    bench = LoadBench()
    untaught = bench.learned()
    bench.finish(bench.book(9_000))
    bench.now += 5.0
    bench.start(bench.book(), 0.4)
    bench.start(bench.book(), 1.0)
    assert bench.learned() != untaught


# --- the books --------------------------------------------------------------------------------------------------------


def test_requests_in_flight_count_by_sequence_adapter_and_block() -> None:
    bench = LoadBench()
    backend_load = bench.backend_load
    asked = [
        request(adapter="x", sequences=2, prefix=(1, 2)),
        request(adapter="x", prefix=(1, 2, 3)),
        request(prefix=(7,)),
    ]
    leases = [bench.book(asked=one) for one in asked]
    assert (backend_load.in_flight, dict(backend_load.adapters.users)) == (4, {"x": 2})
    assert [backend_load.in_use.matched(chain) for chain in ((1, 2, 3, 4), (7, 8), (9,))] == [3, 1, 0]
    bench.finish(leases[1])
    assert (backend_load.in_flight, dict(backend_load.adapters.users)) == (3, {"x": 1})
    assert backend_load.in_use.matched((1, 2, 3)) == 2
    bench.finish(leases[0], leases[2])
    assert (backend_load.in_flight, dict(backend_load.adapters.users)) == (0, {})
    assert backend_load.in_use.matched((1, 2)) == backend_load.in_use.matched((7,)) == 0
    assert bench.queue_s() == pytest.approx(BASE_S)


def test_window_of_a_lower_band_is_its_ceilings_part() -> None:
    bench = LoadBench()
    bench.rates.prefill.seen = 1
    bench.book(4_000.0)
    prompt_s = bench.queue_s() - BASE_S
    load, rates, now = bench.backend_load, bench.rates, bench.now
    assert load.opens_at(rates, 0, 1.0, prompt_s, now) == now
    assert load.opens_at(rates, 0, 0.5, prompt_s, now) == pytest.approx(now + 0.5 * prompt_s)


def test_window_holds_prompts_and_not_the_base_that_they_share() -> None:
    bench = LoadBench()
    bench.rates.prefill.seen, bench.rates.prefill.base = 1, 5.0
    load, rates, now = bench.backend_load, bench.rates, bench.now
    for _ in range(3):
        bench.book(1_500.0)
        assert bench.queue_s() > 5.0
    assert load.opens_at(rates, 0, 1.0, 0.3, now) == now
    bench.book(1_500.0)
    assert load.opens_at(rates, 0, 1.0, 0.3, now) == pytest.approx(now + 0.1)
