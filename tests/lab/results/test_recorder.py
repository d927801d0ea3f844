"""The books of a run: who is counted where."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Outcome, Predicted
from llmproxy.lab.results import recorder as recorder_module
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.recorder import SAMPLES_MAX, TENANTS_KEPT, TENANTS_SHOWN, RunRecorder, band_name
from llmproxy.lab.results.result import PredictionResult, Quantiles, RunResult
from llmproxy.lab.results.sums import OTHER, REFUSALS, STRETCHES
from llmproxy.lab.traces.arrival import Arrival


def record(
    at_s: float = 10.0,
    outcome: Outcome = Outcome.COMPLETED,
    *,
    prompt_tokens: int = 100,
    output_tokens: int = 10,
    hit_tokens: int = 0,
    tenant: str = "acme",
    band: int = DEFAULT,
    backend: str | None = "a",
    met: bool = True,
    queue_wait_s: float | None = 0.5,
) -> Record:
    done = outcome is Outcome.COMPLETED
    served = done or outcome is Outcome.BROKEN_STREAM
    return Record(
        Arrival(at_s, prompt_tokens, output_tokens, tenant=tenant),
        at_s,
        band,
        outcome,
        ended_s=at_s + 2.0,
        backend=None if outcome in REFUSALS else backend,
        attempts=0 if outcome in REFUSALS else 1,
        queue_wait_s=queue_wait_s,
        ttft_s=1.0 if served else None,
        tpot_s=0.02 if done and output_tokens > 1 else None,
        hit_tokens=hit_tokens if served else None,
        output_tokens=output_tokens if done else 0,
        met=done and met,
    )


def result_of(recorder: RunRecorder) -> RunResult:
    return recorder.result("blend", 7, 1.5, 1.9)


def test_every_end_is_completed_refused_or_failed() -> None:
    recorder = RunRecorder(100.0, ["a"])
    for outcome in Outcome:
        recorder.add(record(outcome=outcome))
    result = result_of(recorder)
    assert result.offered == len(Outcome)
    assert (result.completed, result.refused, result.failed) == (1, 12, 6)
    assert result.outcomes == {outcome.value: 1 for outcome in sorted(Outcome)}
    assert set(Outcome) - REFUSALS - {Outcome.COMPLETED} == {
        Outcome.CANCELLED, Outcome.CONNECT_FAILED, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_STATUS,
        Outcome.BROKEN_STREAM, Outcome.INTERNAL,
    }  # fmt: skip


def test_goodput_is_over_all_that_were_offered() -> None:
    recorder = RunRecorder(100.0, ["a"])
    recorder.add(record())
    recorder.add(record(met=False))
    recorder.add(record(outcome=Outcome.SHED))
    recorder.add(record(outcome=Outcome.UPSTREAM_TIMEOUT))
    assert result_of(recorder).goodput == 0.25


def test_latencies_are_of_completed_requests_alone() -> None:
    recorder = RunRecorder(100.0, ["a"])
    recorder.add(record(output_tokens=1))
    expired, broken = record(outcome=Outcome.EXPIRED, queue_wait_s=90.0), record(outcome=Outcome.BROKEN_STREAM)
    expired.ended_s = broken.ended_s = 95.0
    broken.ttft_s = 80.0
    recorder.add(expired)
    recorder.add(broken)
    result = result_of(recorder)
    assert result.queue_wait_s.p99 == 0.5
    assert result.ttft_s.p99 == 1.0
    assert result.e2e_s.mean == 2.0
    assert result.tpot_s == Quantiles()


def test_nothing_that_arrived_during_the_warm_up_is_in_any_figure() -> None:
    recorder = RunRecorder(100.0, ["a"], warmup_s=20.0)
    recorder.add(record(19.9))
    recorder.sample(10.0, {"a": (50, 50)}, {DEFAULT: 9})
    recorder.sample(30.0, {"a": (1, 0)}, {DEFAULT: 2})
    recorder.add(record(20.0, tenant="late"))
    result = result_of(recorder)
    assert result.offered == 1
    assert list(result.by_tenant) == ["late"]
    assert result.by_backend["a"].requests == 1
    assert result.by_backend["a"].mean_running == 1.0
    assert result.utilisation.mean_queued == 2.0


def test_a_run_of_nothing_has_no_ratios() -> None:
    recorder = RunRecorder(0.0, ["a", "b"])
    result, trail = result_of(recorder), recorder.trail()
    assert (result.offered, result.goodput, result.hit_tokens_ratio, result.prefill_imbalance) == (0, None, None, None)
    assert result.ttft_s == Quantiles()
    assert result.by_backend["b"].mean_running is None
    assert (trail.load_at_s, trail.attained) == ([], [])


def test_imbalance_counts_idle_replicas_and_no_cached_tokens() -> None:
    recorder = RunRecorder(100.0, ["a", "b", "idle", "never started"])
    recorder.add(record(backend="a", prompt_tokens=400, hit_tokens=100))
    recorder.add(record(backend="b", prompt_tokens=600, hit_tokens=500))
    recorder.sample(5.0, {"idle": (0, 0)}, {})
    result = result_of(recorder)
    assert result.prefill_imbalance == pytest.approx(300 / (400 / 3))
    assert result.hit_tokens_ratio == 0.6
    assert [result.by_backend[name].prefill_tokens for name in ("a", "b", "idle")] == [300, 100, 0]


def test_broken_stream_counts_its_prompt_unless_no_token_came() -> None:
    recorder = RunRecorder(100.0, ["a"])
    recorder.add(record(outcome=Outcome.BROKEN_STREAM, prompt_tokens=300, hit_tokens=100))
    recorder.add(record(outcome=Outcome.UPSTREAM_TIMEOUT, prompt_tokens=999))
    backend = result_of(recorder).by_backend["a"]
    assert (backend.requests, backend.prefill_tokens, backend.hit_tokens) == (2, 200, 100)


def test_a_whole_answer_counts_its_tokens_without_a_first_token() -> None:
    recorder = RunRecorder(100.0, ["a"])
    whole = record(prompt_tokens=300, hit_tokens=100, output_tokens=50)
    whole.ttft_s = whole.tpot_s = None
    recorder.add(whole)
    result = result_of(recorder)
    backend = result.by_backend["a"]
    assert (backend.prefill_tokens, backend.hit_tokens, backend.output_tokens) == (200, 100, 50)
    assert (result.ttft_s, result.e2e_s.mean) == (Quantiles(), 2.0)


def test_a_backend_that_nobody_named_is_an_error() -> None:
    with pytest.raises(KeyError, match="ghost"):
        RunRecorder(100.0, ["a"]).add(record(backend="ghost"))


def test_bands_have_their_names_and_others_their_numbers() -> None:
    recorder = RunRecorder(100.0, ["a"])
    for band in (CRITICAL, DEFAULT, SHEDDABLE, 7):
        recorder.add(record(band=band))
    assert [band_name(band) for band in (CRITICAL, DEFAULT, SHEDDABLE, 7)] == ["critical", "default", "sheddable", "7"]
    assert list(result_of(recorder).by_band) == ["7", "critical", "default", "sheddable"]


def test_shares_tell_what_each_tenant_asked_for_and_what_it_got() -> None:
    recorder = RunRecorder(100.0, ["a"])
    recorder.add(record(tenant="big", prompt_tokens=290))
    recorder.add(record(tenant="small", prompt_tokens=90, met=False))
    recorder.add(record(tenant="shed", met=False, prompt_tokens=590, outcome=Outcome.SHED))
    tenants = result_of(recorder).by_tenant
    assert {name: group.token_share for name, group in tenants.items()} == {"big": 0.75, "small": 0.25, "shed": 0.0}
    assert {name: group.asked_share for name, group in tenants.items()} == {"big": 0.3, "small": 0.1, "shed": 0.6}
    assert {name: group.goodput for name, group in tenants.items()} == {"big": 1.0, "small": 0.0, "shed": 0.0}


def test_the_largest_tenants_are_shown_and_the_others_summed() -> None:
    recorder = RunRecorder(100.0, ["a"])
    for i in range(TENANTS_SHOWN + 20):
        recorder.add(record(tenant=f"t{i:03d}", prompt_tokens=1_000 - i, outcome=Outcome.COMPLETED))
    tenants = result_of(recorder).by_tenant
    assert len(tenants) == TENANTS_SHOWN + 1
    assert "t000" in tenants
    assert f"t{TENANTS_SHOWN}" not in tenants
    assert tenants[OTHER].offered == 20
    assert sum(group.token_share or 0.0 for group in tenants.values()) == pytest.approx(1.0)


def test_memory_does_not_grow_with_the_number_of_tenants() -> None:
    recorder = RunRecorder(100.0, ["a"])
    recorder.add(record(tenant="whale", prompt_tokens=100_000))
    for i in range(3 * TENANTS_KEPT):
        recorder.add(record(tenant=f"t{i}"))
    assert len(recorder._tenants._groups) <= TENANTS_KEPT
    tenants = result_of(recorder).by_tenant
    assert tenants["whale"].offered == 1
    assert sum(group.offered for group in tenants.values()) == 3 * TENANTS_KEPT + 1
    assert sum(group.output_tokens for group in tenants.values()) == 10 * (3 * TENANTS_KEPT + 1)


def test_looks_at_the_fleet_stay_few_and_evenly_spaced() -> None:
    recorder = RunRecorder(100.0, ["a"])
    for i in range(5 * SAMPLES_MAX):
        recorder.sample(float(i), {"a": (i % 2, 0)}, {})
    times = recorder.trail().load_at_s
    assert SAMPLES_MAX / 2 <= len(times) <= SAMPLES_MAX
    assert {later - earlier for earlier, later in pairwise(times)} == {8.0}


def test_a_sample_has_the_load_of_the_replicas_that_serve() -> None:
    recorder = RunRecorder(100.0, ["a", "b"])
    recorder.sample(0.0, {"a": (3, 2)}, {DEFAULT: 4, CRITICAL: 2})
    recorder.sample(50.0, {"a": (0, 0), "b": (1, 0)}, {})
    use = result_of(recorder).utilisation
    assert [use.busy, use.mean_queued] == pytest.approx([2 / 3, 3.0])
    assert [use.mean_running, use.mean_waiting] == pytest.approx([4 / 3, 2 / 3])


def test_time_axes_widen_when_a_run_lasts_longer_than_its_trace() -> None:
    recorder = RunRecorder(60.0, ["a"])
    for at_s in range(1_000):
        recorder.add(record(float(at_s), met=at_s % 2 == 0))
    times, shares = zip(*recorder.trail().attained, strict=True)
    assert len(times) <= 2 * STRETCHES
    assert times[0] == 0.0
    assert {later - earlier for earlier, later in pairwise(times)} == {16.0}
    assert shares[:-1] == pytest.approx([0.5] * (len(shares) - 1))
    assert result_of(recorder).duration_s == 1_001.0


def test_rates_are_over_the_counted_time() -> None:
    recorder = RunRecorder(110.0, ["a"], warmup_s=10.0)
    recorder.add(record(20.0, prompt_tokens=500, hit_tokens=100, output_tokens=50))
    use = result_of(recorder).utilisation
    assert (result_of(recorder).duration_s, result_of(recorder).counted_s) == (110.0, 100.0)
    assert (use.completed_per_s, use.prefill_tokens_per_s, use.output_tokens_per_s) == (0.01, 4.0, 0.5)


def predicted(at_s: float = 10.0, outcome: Outcome = Outcome.COMPLETED, output_tokens: int = 10) -> Record:
    """Half a second to the first token where 0.4 s were expected; 20 ms for each other token, and 25 ms expected."""
    made = record(at_s, outcome, output_tokens=output_tokens)
    made.backend_ttft_s = 0.5
    made.predicted_ttft, made.predicted_tpot = Predicted(0.4, 0.45), Predicted(0.025, 0.03)
    return made


def test_predictions_are_held_against_what_was_observed() -> None:
    recorder = RunRecorder(100.0, ["a"])
    recorder.add(predicted())
    slow = predicted(output_tokens=1)
    slow.backend_ttft_s = 0.25
    recorder.add(slow)
    found = result_of(recorder).prediction
    assert found.ttft_mape == pytest.approx((0.2 + 0.6) / 2)
    assert found.ttft_p90_coverage == 0.5
    assert found.tpot_mape == pytest.approx(0.25)
    assert found.tpot_p90_coverage == 1.0


def test_only_counted_and_completed_answers_judge_a_prediction() -> None:
    recorder = RunRecorder(100.0, ["a"], warmup_s=5.0)
    recorder.add(record())
    recorder.add(predicted(at_s=1.0))
    recorder.add(predicted(outcome=Outcome.BROKEN_STREAM))
    assert result_of(recorder).prediction == PredictionResult()


def test_too_many_bands_share_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "BANDS_KEPT", 4)
    recorder = RunRecorder(60.0, ["a"])
    for band in range(1, 10):
        recorder.add(record(band=band))
    assert sum(group.offered for group in result_of(recorder).by_band.values()) == 9
