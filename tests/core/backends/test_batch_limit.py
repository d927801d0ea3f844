from __future__ import annotations

from itertools import pairwise
from math import ceil, log2

import pytest

from llmproxy.core.backends.batch_limit import (
    CALM_READINGS_MAX,
    CALM_READINGS_MIN,
    PLATEAU_READINGS,
    UNPUBLISHED,
    BatchLimit,
    slots_under,
)


class Engine:
    """A server that runs `batch` sequences at once, under full load of a band with `ceiling`."""

    def __init__(self, batch: int, limit: BatchLimit, ceiling: float = 1.0, look_ahead: int = 2) -> None:
        self.batch, self.limit, self.ceiling, self.look_ahead = batch, limit, ceiling, look_ahead
        self.waiting_seen: list[int] = []
        self.ran: list[int] = []

    def saturate(self, readings: int) -> None:
        for _ in range(readings):
            load = slots_under(self.limit.value, self.ceiling, self.look_ahead)
            running = min(self.batch, load)
            self.waiting_seen.append(load - running)
            self.ran.append(running)
            self.limit.observe(running, load - running, load)


def test_limit_starts_at_its_setting_and_stays_there_while_unused() -> None:
    limit = BatchLimit(None, 32)
    assert limit.value == 32
    for _ in range(50):
        limit.observe(running=3, waiting=0, load=3)
    assert limit.value == 32


def test_another_start_value_replaces_only_a_limit_that_was_not_learned() -> None:
    unused, grown, learned, configured = BatchLimit(None, 4), BatchLimit(None, 4), BatchLimit(None, 4), BatchLimit(8, 4)
    grown.observe(running=48, waiting=0, load=0)
    learned.begin_at(2, converged=True)
    for start, values in ((64, [64, 64, 2, 8]), (32, [32, 48, 2, 8])):
        for limit in (unused, grown, learned, configured):
            limit.start_at(start)
        assert [limit.value for limit in (unused, grown, learned, configured)] == values
    unused.forget()
    assert unused.value == 32


WAITS = (10, 5, 32)
FILLS = [(running, 32 - running, 32, 32) for running in (4, 8, 12, 16, 20)]


@pytest.mark.parametrize(
    ("readings", "proven"),
    [
        # The limit grows no further beyond the running sequences.
        pytest.param([(32, 0, 34, 64), (35, 0, 66, 80)], False, id="it doubles while the engine follows"),
        pytest.param(
            [(20, 5, 25, 32)] * 2 + [(20, 5, 25, 20), (24, 0, 24, 30)], False, id="then it grows by a quarter"
        ),
        pytest.param([(*WAITS, 32)] * 2 + [(*WAITS, 10)], False, id="fewer readings with a queue are no plateau"),
        pytest.param(FILLS, False, id="a batch that still fills up is no plateau"),
        pytest.param([(100, 0, 10, 100)], False, id="an engine that runs more is believed"),
        pytest.param([(8, 5, 13, 32), (8, 5, 13, 8)], True, id="waiting for the batch alone proves it sooner"),
        pytest.param([(20, 0, 20, 32)] + [(8, 5, 13, 32)] * 2, True, id="less than ever ran proves nothing"),
    ],
)
def test_limit_after_each_reading(readings: list[tuple[int, int, int, int]], proven: bool) -> None:
    limit = BatchLimit(None, 32)
    for running, waiting, load, value in readings:
        limit.observe(running, waiting, load, proven=proven)
        assert limit.value == value


@pytest.mark.parametrize(("kv_room", "value"), [(True, 8), (False, 7)])
def test_sequence_that_comes_between_two_steps_lowers_no_limit(kv_room: bool, value: int) -> None:
    """Short answers leave the batch all the time. With a full KV cache, the engine cannot run as many as before."""
    limit = BatchLimit(8, 4)
    limit.observe(running=8, waiting=0, load=8)
    for _ in range(PLATEAU_READINGS):
        limit.observe(running=7, waiting=1, load=8, kv_room=kv_room)
    assert limit.value == value


@pytest.mark.parametrize(("batch", "readings"), [(2, 3), (4, 3), (8, 3), (16, 4), (64, 6), (256, 8), (1024, 10)])
def test_a_cold_engine_is_filled_within_some_readings(batch: int, readings: int) -> None:
    limit = BatchLimit(None, 4, lowest_ceiling=0.85)
    engine = Engine(batch, limit, 0.85)
    engine.saturate(readings)
    assert engine.ran[-1] == min(batch, slots_under(batch, 0.85, 2)) or engine.ran[-1] == batch
    engine.saturate(4)
    assert limit.value == batch


def converged(batch: int, proven: bool) -> BatchLimit:
    limit = BatchLimit(None, 4, lowest_ceiling=0.85)
    for _ in range(PLATEAU_READINGS):
        limit.observe(running=batch, waiting=5, load=batch + 5, proven=proven)
    return limit


@pytest.mark.parametrize("proven", [True, False])
def test_low_bands_retry_only_a_plateau_that_is_not_proven(proven: bool) -> None:
    limit = converged(64, proven)
    for _ in range(2 * CALM_READINGS_MAX):
        limit.observe(running=60, waiting=0, load=61)
        if limit.value > 64:
            break
    assert (limit.value > 64) is not proven


@pytest.mark.parametrize(("proven", "calm"), [(True, CALM_READINGS_MAX), (False, CALM_READINGS_MIN)])
def test_a_proven_plateau_is_tried_after_the_longest_calm_only(proven: bool, calm: int) -> None:
    limit = converged(64, proven)
    readings = 0
    while limit.value == 64:
        limit.observe(running=64, waiting=0, load=64)
        readings += 1
    assert readings == calm


@pytest.mark.parametrize(("proven", "trials"), [(True, PLATEAU_READINGS), (False, None)])
def test_trials_prove_a_plateau_that_was_first_seen_without_proof(proven: bool, trials: int | None) -> None:
    limit = converged(8, proven=False)
    done = 0
    while not limit.proven and done < 20:
        while limit.value == 8:
            limit.observe(running=8, waiting=0, load=8)
        limit.observe(running=8, waiting=limit.value - 8, load=limit.value, proven=proven)
        done += 1
    assert (done if limit.proven else None) == trials
    assert limit.known == (8, proven)


def test_a_trial_lets_in_one_more_than_the_plateau() -> None:
    limit = converged(64, proven=False)
    while limit.value == 64:
        limit.observe(running=60, waiting=0, load=61)
    assert slots_under(limit.value, 0.95, 0) <= 64 + 2
    assert limit.value * 61 / 64 >= 65


def test_proven_plateau_is_outgrown_by_traffic_that_may_fill_it() -> None:
    limit = converged(64, proven=True)
    limit.observe(running=66, waiting=0, load=66)
    limit.observe(running=70, waiting=0, load=70)
    assert limit.value >= 80


def test_proven_plateau_falls_only_where_much_less_runs() -> None:
    limit = converged(64, proven=True)
    for _ in range(PLATEAU_READINGS):
        limit.observe(running=62, waiting=3, load=65)
    assert limit.value == 64
    for _ in range(PLATEAU_READINGS):
        limit.observe(running=30, waiting=3, load=33)
    assert limit.value == 30


@pytest.mark.parametrize("batch", [4, 33, 64, 200, 256])
@pytest.mark.parametrize("ceiling", [1.0, 0.95, 0.85])
def test_every_band_teaches_the_limit_of_a_saturated_engine(batch: int, ceiling: float) -> None:
    limit = BatchLimit(None, 32, lowest_ceiling=0.85)
    engine = Engine(batch, limit, ceiling)
    engine.saturate(60)
    values = []
    for _ in range(300):
        engine.saturate(1)
        values.append(limit.value)
    # A larger limit is tried from time to time, until a request waits or the trial ends.
    assert min(values) == batch
    assert max(values) <= (batch / ceiling) * 9 / 8 + 3
    queue = engine.waiting_seen[60:]
    assert sum(queue) / len(queue) <= engine.look_ahead + 0.05 * batch


def test_lower_plateau_is_outgrown_when_its_cause_has_passed() -> None:
    limit = BatchLimit(None, 32, lowest_ceiling=0.85)
    engine = Engine(20, limit, 0.95)
    engine.saturate(100)
    assert limit.value <= 23
    engine.batch = 200
    engine.saturate(CALM_READINGS_MAX + 100)
    assert limit.value >= 190


def test_a_trial_that_fails_is_over_with_its_first_reading() -> None:
    engine = Engine(64, BatchLimit(None, 32, lowest_ceiling=0.85), ceiling=0.95)
    engine.saturate(60)
    tried_from = len(engine.waiting_seen)
    engine.saturate(500)
    waited = [number for number, waiting in enumerate(engine.waiting_seen[tried_from:]) if waiting]
    assert waited, "the plateau is tried again"
    assert all(later - earlier > 1 for earlier, later in pairwise(waited))


def test_frozen_gauges_do_not_invite_more_work() -> None:
    limit = BatchLimit(None, 32, lowest_ceiling=0.85)
    for _ in range(100):
        limit.observe(running=1, waiting=0, load=slots_under(limit.value, 1.0, 2))
    assert limit.value == 32
    for _ in range(100):
        limit.observe(running=30, waiting=0, load=slots_under(limit.value, 1.0, 2))
    assert limit.value <= 100


def test_configured_limit_bounds_trials_and_a_queue_may_lower_it() -> None:
    limit = BatchLimit(8, 32)
    assert limit.value == 8
    engine = Engine(100, limit)
    engine.saturate(50)
    assert limit.value == 8
    engine.batch = 5
    engine.saturate(10)
    assert limit.value <= 7


def test_a_busy_answer_takes_the_limit_below_the_load_that_met_it() -> None:
    limit = BatchLimit(None, 32)
    limit.refused(19)
    assert limit.value == 19
    limit.refused(0)
    assert limit.value == 1


def refuse_all(limit: BatchLimit, times: int) -> None:
    """The engine refuses all new requests while its running requests end."""
    for held in range(limit.value, limit.value - times, -1):
        limit.refused(max(0, held))


def test_a_refusal_lowers_a_limit_that_was_proven() -> None:
    limit = converged(64, proven=True)
    limit.refused(61)
    assert limit.value == 61


@pytest.mark.parametrize("batch", [2, 8, 64, 256])
@pytest.mark.parametrize("trials", [0, 1_000])
def test_an_engine_that_refused_all_for_a_while_is_full_again_at_once(batch: int, trials: int) -> None:
    limit = BatchLimit(None, 4)
    engine = Engine(batch, limit, look_ahead=0)
    engine.saturate(20 + trials)
    refuse_all(limit, 2 * batch)
    assert limit.value == 1
    engine.saturate(CALM_READINGS_MIN + ceil(log2(batch)) + 1)
    assert limit.value >= batch
    engine.saturate(PLATEAU_READINGS)
    assert limit.value == batch


@pytest.mark.parametrize("batch", [8, 64])
def test_refused_engine_without_numbers_is_full_again_at_once(batch: int) -> None:
    limit = BatchLimit(None, 4)
    limit.unpublished(0)
    refuse_all(limit, UNPUBLISHED - batch)
    refuse_all(limit, 2 * batch)
    assert limit.value == 1
    for _ in range(CALM_READINGS_MIN + ceil(log2(batch)) + 1):
        limit.unpublished(limit.value)
    assert batch <= limit.value <= UNPUBLISHED


@pytest.mark.parametrize("batch", [8, 64])
@pytest.mark.parametrize("ceiling", [1.0, 0.95])
def test_a_limit_known_by_refusals_alone_is_tried_ever_more_rarely(batch: int, ceiling: float) -> None:
    limit = BatchLimit(None, 4, lowest_ceiling=0.85)
    refused_at: list[int] = []
    for number in range(1_500):
        load = slots_under(limit.value, ceiling, 0)
        for held in range(load - 1, batch - 1, -1):
            limit.refused(held)
            refused_at.append(number)
        running = min(load, batch)
        limit.observe(running, 0, running)
    gaps = [later - earlier for earlier, later in pairwise(sorted(set(refused_at)))]
    assert gaps[3:] == sorted(gaps[3:])
    assert gaps[-1] >= CALM_READINGS_MAX
    assert limit.value >= batch


def test_an_engine_that_others_filled_is_believed_when_it_runs_more() -> None:
    limit = BatchLimit(None, 4)
    limit.refused(3)
    limit.observe(running=8, waiting=0, load=8)
    assert limit.value >= 8


@pytest.mark.parametrize("batch", [4, 32])
def test_a_new_process_may_refuse_at_another_number(batch: int) -> None:
    limit = BatchLimit(None, 4)
    for _ in range(200):
        limit.refused(8) if limit.value > 8 else limit.observe(limit.value, 0, limit.value)
    limit.restarted()
    for _ in range(2 * CALM_READINGS_MIN + 5):
        limit.refused(batch) if limit.value > batch else limit.observe(limit.value, 0, limit.value)
    assert batch <= limit.value <= batch + batch // 4


def test_a_trial_that_fails_again_makes_the_next_one_rarer() -> None:
    limit = BatchLimit(None, 32)
    engine = Engine(32, limit, look_ahead=0)
    trials: list[int] = []
    for index in range(1500):
        before = limit.value
        engine.saturate(1)
        if limit.value > before:
            trials.append(index)
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= CALM_READINGS_MAX


@pytest.mark.parametrize("start", [2, 3])
def test_low_bands_teach_a_small_limit_without_its_last_slot(start: int) -> None:
    limit = BatchLimit(None, start, lowest_ceiling=0.85)
    limit.observe(running=start - 1, waiting=0, load=start - 1)
    assert limit.value > start


@pytest.mark.parametrize("given", [None, 64])
def test_refused_load_without_numbers_is_retried_ever_more_rarely(given: int | None) -> None:
    limit = BatchLimit(given, 4, lowest_ceiling=0.85)
    for held in range(39, -1, -1):
        limit.refused(held)
    assert limit.value == 1
    refused_at: list[int] = []
    for poll in range(3_000):
        limit.unpublished(limit.value)
        if limit.value > 32:
            limit.refused(32)
            refused_at.append(poll)
    assert limit.value >= 32
    gaps = [later - earlier for earlier, later in pairwise(refused_at)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= CALM_READINGS_MAX
    for _ in range(5_000):
        limit.unpublished(limit.value)
    assert limit.value == (given or UNPUBLISHED)


def test_an_engine_without_numbers_that_is_not_full_is_not_tried() -> None:
    limit = BatchLimit(None, 4, lowest_ceiling=0.85)
    limit.unpublished(0)
    limit.refused(20)
    for _ in range(1_000):
        limit.unpublished(10)
    assert limit.value == 20


def test_a_new_process_may_prove_that_it_runs_less_than_the_old_one() -> None:
    limit = BatchLimit(None, 4, lowest_ceiling=0.85)
    for _ in range(PLATEAU_READINGS):
        limit.observe(running=256, waiting=5, load=261, proven=True)
    limit.restarted()
    assert limit.value == 256
    for _ in range(PLATEAU_READINGS):
        limit.observe(running=240, waiting=16, load=256, proven=True)
    assert limit.value == 240


def test_a_new_process_may_run_more_than_the_old_one_proved() -> None:
    limit = converged(8, proven=True)
    limit.restarted()
    for _ in range(CALM_READINGS_MIN):
        limit.observe(running=7, waiting=0, load=7)
    assert limit.value > 8, "bands that do not fill it try it too"


def test_removed_configured_limit_leaves_the_learned_one() -> None:
    limit = BatchLimit(512, 4)
    limit.cap(None)
    assert (limit.value, limit.known) == (4, None)
    limit = BatchLimit(512, 4)
    limit.observe(running=40, waiting=0, load=40)
    limit.cap(None)
    assert limit.value == 40
    limit = BatchLimit(512, 4)
    limit.begin_at(8, converged=True)
    assert limit.value == 512
    limit.cap(None)
    assert (limit.value, limit.known) == (8, (8, True))
