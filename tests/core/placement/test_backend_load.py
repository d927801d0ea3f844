"""One backend beside its view: what it still has to compute, and what its first bytes teach."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from random import Random

import pytest

from llmproxy.core.domain import Request
from llmproxy.core.placement.backend_load import OVERDUE, SAME_STEP_S, WORK_S, BackendLoad, InFlight
from llmproxy.core.placement.rates import PoolRates
from tests.core.make import request

TOKEN_S = 1 / 15_000
"""What a token of a prompt takes, and BASE_S what each stretch of work begins with, as assumed before any was seen."""
BASE_S = 0.03


class Stand:
    """A station, the rates of its pool, and the time."""

    def __init__(self) -> None:
        self.rates = PoolRates()
        self.backend_load = BackendLoad()
        self.now = 100.0
        self._flights: dict[int, InFlight] = {}

    def book(
        self, tokens: float = 1_000.0, cold: bool = False, stream: bool = True, asked: Request | None = None
    ) -> int:
        lease = len(self._flights) + 1
        asked = asked or request(stream=stream, adapter=f"cold-{lease}" if cold else None)
        flight = self._flights[lease] = InFlight(asked, "a", self.backend_load, self.now, tokens, 0.0, cold, 0.1, 0.01)
        self.backend_load.book(lease, flight, self.rates, self.now)
        return lease

    def start(self, lease: int, after_s: float = 0.0) -> None:
        self.now += after_s
        self.backend_load.start(lease, self._flights[lease], self.rates, self.now)

    def finish(self, *leases: int) -> None:
        for lease in leases:
            self.backend_load.finish(lease, self._flights[lease])

    def queue_s(self) -> float:
        return self.backend_load.queue_s(self.rates, self.now)

    def learned(self) -> tuple[float, float, float, float]:
        prefill = self.rates.prefill
        return prefill.base, prefill.slope, self.backend_load.prefill.factor, self.rates.loads.coldest_s


def first_bytes(leases: Iterable[int], stand: Stand, after_s: float) -> None:
    """All in one step, which ends `after_s` from now."""
    for number, lease in enumerate(leases):
        stand.start(lease, SAME_STEP_S / 10 if number else after_s)


# --- the queue --------------------------------------------------------------------------------------------------------


def test_idle_backend_has_a_queue_of_the_base_time() -> None:
    assert Stand().queue_s() == pytest.approx(BASE_S)


def test_queue_grows_with_bookings_and_shrinks_with_time() -> None:
    stand = Stand()
    stand.book(3_000)
    stand.book(1_500)
    assert stand.queue_s() == pytest.approx(BASE_S + 4_500 * TOKEN_S)
    stand.now += 0.1
    assert stand.queue_s() == pytest.approx(BASE_S + 4_500 * TOKEN_S - 0.1)
    # No more of the oldest can be done than there is.
    stand.now += 0.2
    assert stand.queue_s() == pytest.approx(BASE_S + 1_500 * TOKEN_S)


def test_next_prompt_begins_at_the_first_byte_of_the_previous_one() -> None:
    stand = Stand()
    first = stand.book(3_000)
    stand.book(3_000)
    stand.start(first, 0.23)
    assert stand.queue_s() == pytest.approx(BASE_S + 3_000 * TOKEN_S)
    stand.now += 0.05
    assert stand.queue_s() == pytest.approx(BASE_S + 3_000 * TOKEN_S - 0.05)


def test_request_that_ends_before_its_first_byte_leaves_the_queue() -> None:
    stand = Stand()
    stand.finish(stand.book(3_000), stand.book(3_000))
    assert stand.queue_s() == pytest.approx(BASE_S)


def test_overdue_first_byte_lengthens_the_queue_by_its_lateness() -> None:
    stand = Stand()
    stuck = stand.book(3_000)
    stand.now += OVERDUE * (BASE_S + 3_000 * TOKEN_S)
    assert stand.queue_s() == pytest.approx(BASE_S)
    stand.now += 20.0
    assert stand.queue_s() == pytest.approx(BASE_S + 20.0)
    stand.finish(stuck)
    assert stand.queue_s() == pytest.approx(BASE_S)


def test_prompt_behind_others_is_due_later() -> None:
    stand = Stand()
    first = stand.book(15_000)
    stand.book(1_500)
    stand.start(first, 1.0)
    stand.now += 1.0
    assert stand.queue_s() < 0.1
    stand.now += 1.0
    assert stand.queue_s() > 0.5


def test_prompt_on_a_slow_backend_is_due_later() -> None:
    stand = Stand()
    stand.backend_load.prefill.factor = 2.0
    stand.book(3_000)
    stand.now += 1.5 * OVERDUE * (BASE_S + 3_000 * TOKEN_S)
    assert stand.queue_s() == pytest.approx(2.0 * BASE_S)


def test_answer_without_a_stream_is_never_overdue() -> None:
    stand = Stand()
    plain = stand.book(3_000, stream=False)
    stand.book(1_500, stream=False)
    stand.now += 0.3
    assert stand.queue_s() == pytest.approx(BASE_S + 1_500 * TOKEN_S)
    stand.now += 50.0
    assert stand.queue_s() == pytest.approx(BASE_S)
    stand.start(plain)
    stand.finish(plain)
    assert stand.queue_s() == pytest.approx(BASE_S)


def test_a_backend_of_half_the_pace_has_a_queue_of_twice_the_time() -> None:
    stand = Stand()
    stand.backend_load.prefill.factor = 2.0
    stand.book(3_000)
    assert stand.queue_s() == pytest.approx(2.0 * (BASE_S + 3_000 * TOKEN_S))


# --- how busy it is ---------------------------------------------------------------------------------------------------


def test_busy_share_is_measured_and_forgotten() -> None:
    stand = Stand()
    assert stand.backend_load.busy_share.at(stand.now) == 0.0
    for _ in range(400):
        stand.now += 0.5
        stand.book(0.5 * 0.4 / TOKEN_S)
    share = stand.backend_load.busy_share.at(stand.now)
    assert share == pytest.approx(0.4, rel=0.05)
    assert stand.backend_load.busy_share.at(stand.now + WORK_S) == pytest.approx(share / 2.718, rel=0.01)
    assert stand.backend_load.busy_share.at(stand.now + 10 * WORK_S) < 1e-4


def test_a_backend_may_be_given_more_than_it_can_do() -> None:
    stand = Stand()
    for _ in range(400):
        stand.now += 0.5
        stand.book(0.5 * 1.5 / TOKEN_S)
    assert stand.backend_load.busy_share.at(stand.now) == pytest.approx(1.5, rel=0.05)


def test_the_same_prompts_keep_a_slow_backend_busier() -> None:
    usual, slow = Stand(), Stand()
    slow.backend_load.prefill.factor = 2.0
    for stand in (usual, slow):
        stand.book(3_000)
    assert slow.backend_load.busy_share.at(100.0) == pytest.approx(2.0 * usual.backend_load.busy_share.at(100.0))


# --- what first bytes teach -------------------------------------------------------------------------------------------


def test_first_byte_counts_from_the_previous_one_or_the_first_prompt() -> None:
    stand = Stand()
    for i in range(1_200):
        tokens = 200.0 * (1 + i % 9)
        pair = [stand.book(tokens), stand.book(tokens)]
        stand.start(pair[0], 0.05 + tokens / 5_000)
        stand.start(pair[1], 0.05 + tokens / 5_000)
        stand.finish(*pair)
        stand.now += 60.0
    assert stand.learned()[:2] == pytest.approx((0.05, 1 / 5_000), rel=0.02)
    assert stand.learned()[2] == pytest.approx(1.0, abs=0.01)


def test_first_bytes_of_one_step_are_learned_together() -> None:
    stand = Stand()
    before_s = stand.rates.prefill.at(1_000.0)
    for i in range(600):
        together = [stand.book(500.0 * (1 + (i + n) % 3)) for n in range(4)]
        tokens = sum(500.0 * (1 + (i + n) % 3) for n in range(4))
        first_bytes(together, stand, 0.03 + tokens * TOKEN_S)
        stand.finish(*together)
        stand.now += 1.0
    assert stand.rates.prefill.at(1_000.0) == pytest.approx(before_s, rel=0.02)
    assert stand.backend_load.prefill.factor == 1.0


def test_prompt_that_waited_for_a_batch_slot_teaches_nothing() -> None:
    stand = Stand()
    stand.backend_load.limit = 2
    untaught = stand.learned()
    leases = [stand.book(1_000) for _ in range(4)]
    for lease in leases[:3]:
        stand.start(lease, 0.5)
    taught = stand.learned()
    assert taught != untaught
    stand.start(leases[3], 0.5)
    assert stand.learned() == taught


def test_a_step_says_nothing_before_the_next_one_began() -> None:
    stand = Stand()
    untaught = stand.learned()
    first_bytes([stand.book(), stand.book()], stand, 1.0)
    assert stand.learned() == untaught
    stand.start(stand.book(), 1.0)
    assert stand.learned() != untaught


def test_step_with_a_cold_adapter_teaches_no_prompt_time() -> None:
    stand = Stand()
    base, slope, factor, _ = stand.learned()
    for cold_first in (True, False) * 30:
        pair = [stand.book(cold=cold_first), stand.book(cold=not cold_first)]
        first_bytes(pair, stand, BASE_S + 2_000 * TOKEN_S + 0.7)
        stand.finish(*pair)
        stand.now += 1.0
    assert stand.learned()[:3] == (base, slope, factor)
    assert stand.rates.loads.coldest_s == pytest.approx(0.7, rel=0.1)


def test_step_before_a_cold_adapter_is_learned() -> None:
    stand = Stand()
    untaught = stand.learned()[:3]
    stand.start(stand.book(), 3.0)
    stand.start(stand.book(cold=True), 1.0)
    taught = stand.learned()[:3]
    assert taught != untaught
    stand.start(stand.book(), 1.0)
    assert stand.learned()[:3] == taught


@pytest.mark.parametrize("plain_share", [0.0, 0.3, 0.8])
def test_answers_without_a_stream_do_not_mislead_those_with_one(plain_share: float) -> None:
    """Prompts are computed one after the other; those without a stream show a byte two seconds later."""
    rng, stand = Random(2), Stand()
    token_s, base_s = 1 / 8_000, 0.04
    events: list[tuple[float, int]] = []
    came_s = free_s = 0.0
    for _ in range(2_000):
        came_s += rng.expovariate(3.0)
        heappush(events, (came_s, 0))
    while events:
        stand.now, lease = heappop(events)
        if lease:
            stand.start(lease)
            stand.finish(lease)
            continue
        stand.queue_s()
        tokens, plain = rng.choice((200.0, 1_000.0, 4_000.0)), rng.random() < plain_share
        lease = stand.book(tokens, stream=not plain)
        free_s = (free_s if free_s > stand.now else stand.now + base_s) + tokens * token_s
        heappush(events, (free_s + 2.0 * plain, lease))
    # Only what begins on an idle backend takes the base.
    assert 0.0 < stand.rates.prefill.base < base_s
    assert stand.rates.prefill.slope == pytest.approx(token_s, rel=0.05)


def test_prompt_that_ended_unseen_spoils_the_next_first_byte() -> None:
    stand = Stand()
    untaught = stand.learned()
    gone, stays = stand.book(9_000), stand.book()
    stand.now += 0.3
    stand.finish(gone)
    stand.start(stays, 0.4)
    stand.start(stand.book(), 1.0)
    assert stand.learned() == untaught


def test_prompt_that_ended_unseen_is_forgotten_on_an_idle_backend() -> None:
    stand = Stand()
    untaught = stand.learned()
    stand.finish(stand.book(9_000))
    stand.now += 5.0
    stand.start(stand.book(), 0.4)
    stand.start(stand.book(), 1.0)
    assert stand.learned() != untaught


# --- the books --------------------------------------------------------------------------------------------------------


def test_requests_in_flight_count_by_sequence_adapter_and_block() -> None:
    stand = Stand()
    backend_load = stand.backend_load
    asked = [
        request(adapter="x", sequences=2, prefix=(1, 2)),
        request(adapter="x", prefix=(1, 2, 3)),
        request(prefix=(7,)),
    ]
    leases = [stand.book(asked=one) for one in asked]
    assert (backend_load.in_flight, dict(backend_load.adapters.users)) == (4, {"x": 2})
    assert [backend_load.in_use.matched(chain) for chain in ((1, 2, 3, 4), (7, 8), (9,))] == [3, 1, 0]
    stand.finish(leases[1])
    assert (backend_load.in_flight, dict(backend_load.adapters.users)) == (3, {"x": 1})
    assert backend_load.in_use.matched((1, 2, 3)) == 2
    stand.finish(leases[0], leases[2])
    assert (backend_load.in_flight, dict(backend_load.adapters.users)) == (0, {})
    assert backend_load.in_use.matched((1, 2)) == backend_load.in_use.matched((7,)) == 0
    assert stand.queue_s() == pytest.approx(BASE_S)
