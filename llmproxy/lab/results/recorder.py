"""The figures of one run, from request records and samples of the fleet, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from typing import Any

from llmproxy.core.domain import BAND_NAMES, Outcome
from llmproxy.lab.fleet.spec import Fault
from llmproxy.lab.results.audit import Audit
from llmproxy.lab.results.fairness import Adherence, ServiceDifference
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.result import (
    BackendResult,
    FairnessResult,
    FaultDetection,
    Loaded,
    PredictionResult,
    RunResult,
    ScaledResult,
    Trail,
    Utilisation,
)
from llmproxy.lab.results.sketch import Sketch
from llmproxy.lab.results.sums import (
    BANDS_KEPT,
    BackendSums,
    Group,
    Groups,
    PredictionErrors,
    Timeline,
    quantiles,
    ratio,
)
from llmproxy.lab.simulator.engine.reports import Counters

TENANTS_SHOWN = 100
TENANTS_KEPT = 400
"""Maximum number of tenants with separate sums. Beyond it, the smaller half is merged into "(other)"."""
SAMPLES_MAX = 512
KEPT_SHARE = 0.95  # An interval counts as a violation if a smaller share of its arrivals meets their objectives.

_NAMES = {level: name for name, level in reversed(list(BAND_NAMES.items()))}


def band_name(band: int) -> str:
    return _NAMES.get(band, str(band))


@dataclass(slots=True)
class _Sample:
    at_s: float
    load: dict[str, tuple[int, int]]
    queued: int


class RunRecorder:
    """Collects the figures of one run.

    `duration_s` is the length of the trace, which sets the resolution of the time axes; a run may last longer.
    `replicas` includes idle replicas. Requests that arrived before `warmup_s` are in no figure.
    """

    def __init__(self, duration_s: float, replicas: Sequence[str], warmup_s: float = 0.0) -> None:
        self._duration_s = duration_s
        self._warmup_s = warmup_s
        self.service = ServiceDifference()
        self._adherence = Adherence(duration_s)
        self._preemptions = 0
        self._inversions = 0
        self._ejections = 0
        self._detections: list[FaultDetection] = []
        self._counter_difference: float | None = None
        self._unfinished_tokens_most = 0
        self._prompt_tokens_most = 0
        self._outputs: list[Counter[str]] = []
        self._total = Group()
        self._e2e = Sketch()
        self._ttft_foresight, self._tpot_foresight = PredictionErrors(), PredictionErrors()
        self._outcomes: Counter[Outcome] = Counter()
        self._attempts = 0
        self._split = 0
        self.prefill_share: float | None = None
        self._adapter_requests = 0
        self._adapter_loads = 0
        self._ended_s = 0.0
        self._bands = Groups(BANDS_KEPT)
        self._tenants = Groups(TENANTS_KEPT)
        self._backends = {name: BackendSums() for name in replicas}
        self._met = Timeline(duration_s)
        self._samples: list[_Sample] = []
        self._served: set[str] = set()
        self._spacing = 1
        self._scaled: ScaledResult | None = None
        self._scale_trail: list[tuple[float, int, int]] = []
        self._looks = 0

    def add(self, record: Record) -> None:
        if record.arrived_s < self._warmup_s:
            return
        band, tenant = band_name(record.band), record.arrival.tenant
        for group in (self._total, self._bands.group(band), self._tenants.group(tenant)):
            group.add(record)
        if record.hit_tokens is not None:
            self.service.ended(record.arrival.tenant, record.arrival.prompt_tokens, record.output_tokens)
        if record.outcome is not Outcome.CANCELLED:
            self._adherence.ended(record.arrival.tenant, record.met, record.ended_s)
        self._prompt_tokens_most = max(self._prompt_tokens_most, record.arrival.prompt_tokens)
        self._preemptions += record.preemptions
        self._met.add(record.arrived_s, record.met)
        self._outcomes[record.outcome] += 1
        self._attempts += record.attempts
        self._ended_s = max(self._ended_s, record.ended_s)
        if record.backend is not None:
            self._backends[record.backend].add(record)
            self._backends[record.prefilled_on or record.backend].add_prompt(record)
            self._split += record.prefilled_on is not None
        if record.outcome is Outcome.COMPLETED:
            self._e2e.add(record.ended_s - record.arrived_s)
            self._ttft_foresight.add(record.predicted_ttft, record.backend_ttft_s)
            self._tpot_foresight.add(record.predicted_tpot, record.tpot_s)

    def sample(self, at_s: float, load: Mapping[str, tuple[int, int]], queued: Mapping[int, int]) -> None:
        """Adds a sample of the fleet.

        `load` maps each serving replica to (running, waiting), `queued` each band to its requests in the proxies.
        Samples come at equal intervals. If there are too many, every second one is dropped.
        """
        self._looks += 1
        self._served.update(load)
        if (self._looks - 1) % self._spacing:
            return
        if len(self._samples) == SAMPLES_MAX:
            del self._samples[1::2]
            self._spacing *= 2
        self._samples.append(_Sample(at_s, dict(load), sum(queued.values())))

    def scaled(
        self, trail: list[tuple[float, int, int]], cost_s: float, turn_s: float, begin_s: float, end_s: float
    ) -> None:
        """Sets the figures of the autoscaler.

        `trail` has (second, wanted replicas, serving replicas) at each reading of the signal. `cost_s` is the
        replica-seconds between `begin_s` and `end_s`. `turn_s` is the `within_s` of `changes_of`.
        """
        peak = max((wanted for _, wanted, _ in trail), default=0)
        turns = changes_of(trail, turn_s)
        mean = cost_s / max(1e-9, end_s - begin_s)
        self._scaled = ScaledResult(mean=mean, peak=peak, turns=turns, violated_s=self._violated_s())
        self._scale_trail = [(at_s - begin_s, wanted, serving) for at_s, wanted, serving in trail]

    def output(self, tokens: Mapping[int, int]) -> None:
        """Sets the tokens that each band has streamed so far. Called at the end of the warm-up and of the trace."""
        named: Counter[str] = Counter()
        for band, count in tokens.items():
            named[band_name(band)] += count
        self._outputs.append(named)

    def audited(self, audit: Audit) -> None:
        self._inversions += audit.inversions
        self._unfinished_tokens_most += audit.unfinished_tokens_most
        if audit.counter_difference is not None:
            self._counter_difference = max(self._counter_difference or 0.0, audit.counter_difference)

    def ejected(self, times: int) -> None:
        self._ejections += times

    def fault_detected(self, fault: Fault, replica: str, detected_s: float | None) -> None:
        """Records the seconds until a fault was detected; None if it ended undetected."""
        self._detections.append(FaultDetection(kind=fault.kind, replica=replica, at_s=fault.at_s, noticed_s=detected_s))

    def counted(self, replica: str, counters: Counters) -> None:
        self._backends[replica].engine_preemptions = counters.preemptions
        self._adapter_requests += counters.adapter_requests
        self._adapter_loads += counters.adapter_loads

    def result(self, policy: str, seed: int, rate_scale: float, prefill_scale: float) -> RunResult:
        total = self._total
        duration_s = max(self._duration_s, self._ended_s)
        counted_s = duration_s - self._warmup_s
        return RunResult(
            policy=policy,
            seed=seed,
            rate_scale=rate_scale,
            prefill_scale=prefill_scale,
            **total.figures(),
            e2e_s=quantiles(self._e2e),
            hit_tokens_ratio=ratio(total.hit_tokens, total.prompt_tokens),
            adapter_hit_ratio=ratio(self._adapter_requests - self._adapter_loads, self._adapter_requests),
            prefill_imbalance=self._imbalance(),
            service_difference_tokens=self.service.largest,
            duration_s=duration_s,
            counted_s=counted_s,
            replicas=self._scaled,
            attempts=self._attempts,
            split=self._split,
            prefill_share=self.prefill_share,
            preemptions=self._preemptions,
            inversions=self._inversions,
            ejections=self._ejections,
            noticed=sorted(self._detections, key=lambda one: (one.at_s, one.replica)),
            outcomes={outcome.value: count for outcome, count in self._outcomes.items()},
            utilisation=self._utilisation(counted_s),
            loaded=self._loaded(),
            fairness=FairnessResult(
                counter_difference=self._counter_difference,
                jain_least=self.service.windows.least,
                adherence_least=self._adherence.least,
                ended_most=self._adherence.most,
                prompt_tokens_most=self._prompt_tokens_most,
                unfinished_tokens_most=self._unfinished_tokens_most,
            ),
            prediction=self._prediction(),
            by_band={name: group.result(total) for name, group in self._bands.largest(BANDS_KEPT)},
            by_tenant={name: group.result(total) for name, group in self._tenants.largest(TENANTS_SHOWN)},
            by_backend={name: self._backend(name) for name in self._backends},
        )

    def trail(self) -> Trail:
        """Returns the time series that only plots need."""
        return Trail(
            load_at_s=[sample.at_s for sample in self._samples],
            queued=[sample.queued for sample in self._samples],
            attained=[(at_s, stretch.total / stretch.count) for at_s, stretch in self._met.intervals()],
            scaled=self._scale_trail,
        )

    # --- parts of the result ------------------------------------------------------------------------------------------

    def _violated_s(self) -> float:
        below = sum(stretch.total < KEPT_SHARE * stretch.count for _, stretch in self._met.intervals())
        return below * self._met.width_s

    def _loaded(self) -> Loaded:
        if len(self._outputs) < 2:
            return Loaded(duration_s=0.0, output_tokens={})
        before, after = self._outputs
        tokens = {band: count - before[band] for band, count in after.items()}
        return Loaded(duration_s=self._duration_s - self._warmup_s, output_tokens=tokens)

    def _prediction(self) -> PredictionResult:
        ttft, tpot = self._ttft_foresight, self._tpot_foresight
        return PredictionResult(
            ttft_mape=ratio(ttft.error_ratios, ttft.count),
            ttft_p90_coverage=ratio(ttft.covered, ttft.count),
            tpot_mape=ratio(tpot.error_ratios, tpot.count),
            tpot_p90_coverage=ratio(tpot.covered, tpot.count),
        )

    def _imbalance(self) -> float | None:
        served = [one for name, one in self._backends.items() if name in self._served or one.prefill_tokens]
        computed = [backend.prefill_tokens for backend in served]
        return ratio(max(computed) * len(computed), sum(computed)) if computed else None

    def _counted(self, replica: str) -> list[tuple[int, int]]:
        return [s.load[replica] for s in self._samples if s.at_s >= self._warmup_s and replica in s.load]

    def _backend(self, name: str) -> BackendResult:
        return BackendResult(**asdict(self._backends[name]), **_means(self._counted(name)))

    def _utilisation(self, counted_s: float) -> Utilisation:
        looks = [look for name in self._backends for look in self._counted(name)]
        queued = [sample.queued for sample in self._samples if sample.at_s >= self._warmup_s]
        return Utilisation(
            completed_per_s=ratio(self._total.completed, counted_s),
            prefill_tokens_per_s=ratio(sum(b.prefill_tokens for b in self._backends.values()), counted_s),
            output_tokens_per_s=ratio(self._total.output_tokens, counted_s),
            busy=ratio(sum(running + waiting > 0 for running, waiting in looks), len(looks)),
            mean_queued=ratio(sum(queued), len(queued)),
            **_means(looks),
        )


def _means(looks: Sequence[tuple[int, int]]) -> dict[str, Any]:
    running, waiting = (ratio(sum(look[i] for look in looks), len(looks)) for i in (0, 1))
    return {"mean_running": running, "mean_waiting": waiting}


def changes_of(trail: list[tuple[float, int, int]], within_s: float) -> int:
    """Counts how often the wanted number of replicas changed its direction within `within_s` (flapping)."""
    turns, last, last_s = 0, 0, -inf
    for (_, before, _), (at_s, after, _) in pairwise(trail):
        direction = (after > before) - (after < before)
        if direction:
            turns += direction == -last and at_s - last_s <= within_s
            last, last_s = direction, at_s
    return turns
