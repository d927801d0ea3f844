"""The books of one run: every request's end and every look at the fleet, in memory that no trace can make grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmproxy.core.domain import BAND_NAMES, Outcome
from llmproxy.lab.record import Record
from llmproxy.lab.result import BackendResult, GroupResult, Quantiles, RunResult, Trail, Utilisation, WaitPoint
from llmproxy.lab.service import ServiceDifference
from llmproxy.lab.sketch import Sketch
from llmproxy.simulator.engine import Counters

OTHER = "(other)"
TENANTS_TOLD = 100
TENANTS_KEPT = 400
"""When there are more, the smaller half is told as "(other)": a tenant that comes back after that starts at nothing."""
BANDS_KEPT = 64
STRETCHES = 60
SAMPLES_MAX = 512
CDF_POINTS = 80

REFUSALS = frozenset(
    {
        Outcome.BAD_REQUEST,
        Outcome.UNKNOWN_MODEL,
        Outcome.UNAUTHORIZED,
        Outcome.TOO_LARGE,
        Outcome.REJECTED_CAPACITY,
        Outcome.REJECTED_NO_BACKENDS,
        Outcome.EXPIRED,
        Outcome.EXPIRED_NO_BACKENDS,
        Outcome.SHED,
        Outcome.DRAINING,
    }
)
"""The ends of requests that no backend was to blame for: they were turned away, or left the waiting room."""
_NAMES = {level: name for name, level in reversed(list(BAND_NAMES.items()))}


def band_name(band: int) -> str:
    """The name of a band as the configuration has it, or its number."""
    return _NAMES.get(band, str(band))


class Account:
    """Everything that is told of one run.

    `duration_s` is the length of the trace and only sets how fine the time axes are: a run may last longer.
    `replicas` are all that were there, the idle ones too. Requests that arrived before `warmup_s` are in no figure.
    """

    def __init__(self, duration_s: float, replicas: Sequence[str], warmup_s: float = 0.0) -> None:
        self._duration_s = duration_s
        self._warmup_s = warmup_s
        self.service = ServiceDifference()
        self._total = _Group()
        self._e2e = Sketch()
        self._outcomes: Counter[Outcome] = Counter()
        self._attempts = 0
        self._adapter_requests = 0
        self._adapter_loads = 0
        self._ended_s = 0.0
        self._bands = _Groups(BANDS_KEPT)
        self._tenants = _Groups(TENANTS_KEPT)
        self._backends = {name: _Backend() for name in replicas}
        self._waits = _Timeline(duration_s)
        self._prompts = _Timeline(duration_s)
        self._samples: list[_Sample] = []
        self._spacing = 1
        self._looks = 0

    def add(self, record: Record) -> None:
        """A request ended. Raises KeyError for a backend that is none of the replicas."""
        if record.arrived_s < self._warmup_s:
            return
        band = band_name(record.band)
        for group in (self._total, self._bands.of(band), self._tenants.of(record.arrival.tenant)):
            group.add(record)
        if record.ttft_s is not None:
            self.service.ended(record.arrival.tenant, record.arrival.prompt_tokens, record.output_tokens)
        self._outcomes[record.outcome] += 1
        self._attempts += record.attempts
        self._ended_s = max(self._ended_s, record.ended_s)
        if record.backend is not None:
            self._backends[record.backend].add(record)
        if record.queue_wait_s is not None:
            self._waits.add(band, record.arrived_s, record.queue_wait_s)
        if record.outcome is Outcome.COMPLETED:
            self._e2e.add(record.ended_s - record.arrived_s)
            self._prompts.add("hit", record.arrived_s, record.hit_tokens)
            self._prompts.add("all", record.arrived_s, record.arrival.prompt_tokens)

    def sample(self, at_s: float, load: Mapping[str, tuple[int, int]], queued: Mapping[int, int]) -> None:
        """A look at the fleet: (running, waiting) inside each replica, and requests in the proxies by band.

        Looks are expected at even distances; of too many, every second one is forgotten.
        """
        self._looks += 1
        if (self._looks - 1) % self._spacing:
            return
        if len(self._samples) == SAMPLES_MAX:
            del self._samples[1::2]
            self._spacing *= 2
        self._samples.append(_Sample(at_s, dict(load), sum(queued.values())))

    def counted(self, replica: str, counters: Counters) -> None:
        """What the engine of `replica` counted in the whole run."""
        self._backends[replica].preemptions = counters.preemptions
        self._adapter_requests += counters.adapter_requests
        self._adapter_loads += counters.adapter_loads

    def result(self, policy: str, seed: int, rate_scale: float, prefill_scale: float) -> RunResult:
        """The figures of the run, under the name that the caller gives it."""
        total = self._total
        duration_s = max(self._duration_s, self._ended_s)
        return RunResult(
            policy=policy,
            seed=seed,
            rate_scale=rate_scale,
            prefill_scale=prefill_scale,
            offered=total.offered,
            completed=total.completed,
            refused=total.refused,
            failed=total.failed,
            goodput=_ratio(total.met, total.offered),
            ttft_s=_quantiles(total.ttft),
            tpot_s=_quantiles(total.tpot),
            queue_wait_s=_quantiles(total.queue_wait),
            e2e_s=_quantiles(self._e2e),
            hit_tokens_ratio=_ratio(total.hit_tokens, total.prompt_tokens),
            adapter_hit_ratio=_ratio(self._adapter_requests - self._adapter_loads, self._adapter_requests),
            prefill_imbalance=self._imbalance(),
            service_difference_tokens=self.service.largest,
            duration_s=duration_s,
            attempts=self._attempts,
            outcomes={outcome.value: count for outcome, count in self._outcomes.items()},
            utilisation=self._utilisation(duration_s - self._warmup_s),
            by_band={name: group.result(total) for name, group in self._bands.largest(BANDS_KEPT)},
            by_tenant={name: group.result(total) for name, group in self._tenants.largest(TENANTS_TOLD)},
            by_backend={name: self._backend(name) for name in self._backends},
        )

    def trail(self) -> Trail:
        """What the plots of the run need beyond its figures."""
        hits, hit_tokens, prompt_tokens = [], 0.0, 0.0
        hit_at = {at_s: stretch.total for at_s, stretch in self._prompts.of("hit")}
        for at_s, stretch in self._prompts.of("all"):
            hit_tokens += hit_at[at_s]
            prompt_tokens += stretch.total
            if prompt_tokens:
                hits.append((at_s, hit_tokens / prompt_tokens))
        return Trail(
            ttft_cdf=self._total.ttft.cdf(CDF_POINTS) or [],
            tpot_cdf=self._total.tpot.cdf(CDF_POINTS) or [],
            queue_wait={
                band: [
                    WaitPoint(at_s=at_s, mean_s=stretch.total / stretch.count, max_s=stretch.peak)
                    for at_s, stretch in self._waits.of(band)
                ]
                for band in self._waits.names()
            },
            hits=hits,
            load_at_s=[sample.at_s for sample in self._samples],
            load={name: [sum(sample.load.get(name, (0, 0))) for sample in self._samples] for name in self._backends},
        )

    # --- parts of the result ------------------------------------------------------------------------------------------

    def _imbalance(self) -> float | None:
        computed = [backend.prefill_tokens for backend in self._backends.values()]
        return _ratio(max(computed) * len(computed), sum(computed)) if computed else None

    def _counted(self, replica: str) -> list[tuple[int, int]]:
        return [s.load.get(replica, (0, 0)) for s in self._samples if s.at_s >= self._warmup_s]

    def _backend(self, name: str) -> BackendResult:
        backend, looks = self._backends[name], self._counted(name)
        return BackendResult(
            requests=backend.requests,
            prefill_tokens=backend.prefill_tokens,
            hit_tokens=backend.hit_tokens,
            output_tokens=backend.output_tokens,
            preemptions=backend.preemptions,
            mean_running=_ratio(sum(running for running, _ in looks), len(looks)),
            mean_waiting=_ratio(sum(waiting for _, waiting in looks), len(looks)),
        )

    def _utilisation(self, counted_s: float) -> Utilisation:
        looks = [look for name in self._backends for look in self._counted(name)]
        queued = [sample.queued for sample in self._samples if sample.at_s >= self._warmup_s]
        return Utilisation(
            completed_per_s=_ratio(self._total.completed, counted_s),
            prefill_tokens_per_s=_ratio(sum(b.prefill_tokens for b in self._backends.values()), counted_s),
            output_tokens_per_s=_ratio(self._total.output_tokens, counted_s),
            busy=_ratio(sum(running + waiting > 0 for running, waiting in looks), len(looks)),
            mean_running=_ratio(sum(running for running, _ in looks), len(looks)),
            mean_waiting=_ratio(sum(waiting for _, waiting in looks), len(looks)),
            mean_queued=_ratio(sum(queued), len(queued)),
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _quantiles(sketch: Sketch) -> Quantiles:
    return Quantiles(mean=sketch.mean, p50=sketch.quantile(0.5), p90=sketch.quantile(0.9), p99=sketch.quantile(0.99))


# --- what is counted --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sample:
    at_s: float
    load: dict[str, tuple[int, int]]
    queued: int


@dataclass(slots=True)
class _Backend:
    requests: int = 0
    prefill_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0

    def add(self, record: Record) -> None:
        self.requests += 1
        # Without a first token nobody knows how much of the prompt was computed.
        if record.ttft_s is not None:
            self.prefill_tokens += record.arrival.prompt_tokens - record.hit_tokens
            self.hit_tokens += record.hit_tokens
            self.output_tokens += record.output_tokens


@dataclass(slots=True)
class _Group:
    """Some of the requests: all of them, or those of one band or tenant."""

    offered: int = 0
    completed: int = 0
    refused: int = 0
    met: int = 0
    asked_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    ttft: Sketch = field(default_factory=Sketch)
    tpot: Sketch = field(default_factory=Sketch)
    queue_wait: Sketch = field(default_factory=Sketch)

    @property
    def failed(self) -> int:
        return self.offered - self.completed - self.refused

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def add(self, record: Record) -> None:
        arrival = record.arrival
        self.offered += 1
        self.asked_tokens += arrival.prompt_tokens + arrival.output_tokens
        self.refused += record.outcome in REFUSALS
        if record.outcome is not Outcome.COMPLETED:
            return
        self.completed += 1
        self.met += record.met
        self.prompt_tokens += arrival.prompt_tokens
        self.hit_tokens += record.hit_tokens
        self.output_tokens += record.output_tokens
        for sketch, value in (
            (self.ttft, record.ttft_s),
            (self.tpot, record.tpot_s),
            (self.queue_wait, record.queue_wait_s),
        ):
            if value is not None:
                sketch.add(value)

    def merge(self, other: _Group) -> None:
        for count in ("offered", "completed", "refused", "met", "asked_tokens", "prompt_tokens", "hit_tokens"):
            setattr(self, count, getattr(self, count) + getattr(other, count))
        self.output_tokens += other.output_tokens
        self.ttft.merge(other.ttft)
        self.tpot.merge(other.tpot)
        self.queue_wait.merge(other.queue_wait)

    def result(self, total: _Group) -> GroupResult:
        return GroupResult(
            offered=self.offered,
            completed=self.completed,
            refused=self.refused,
            failed=self.failed,
            goodput=_ratio(self.met, self.offered),
            ttft_s=_quantiles(self.ttft),
            tpot_s=_quantiles(self.tpot),
            queue_wait_s=_quantiles(self.queue_wait),
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            output_tokens=self.output_tokens,
            token_share=_ratio(self.tokens, total.tokens),
            asked_share=_ratio(self.asked_tokens, total.asked_tokens),
        )


class _Groups:
    """Groups by name, at most `kept` of them and one for all others."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._groups: dict[str, _Group] = {}
        self._other = _Group()

    def of(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) >= self._kept:
                self._forget_all_but(self._kept // 2)
            group = self._groups[name] = _Group()
        return group

    def largest(self, told: int) -> Iterator[tuple[str, _Group]]:
        """The `told` largest by tokens, then all others as one, which is left out when there is nothing in it."""
        rest = _Group()
        rest.merge(self._other)
        for rank, (name, group) in enumerate(self._ranked()):
            if rank < told:
                yield name, group
            else:
                rest.merge(group)
        if rest.offered:
            yield OTHER, rest

    def _forget_all_but(self, count: int) -> None:
        ranked = self._ranked()
        self._groups = dict(ranked[:count])
        for _, group in ranked[count:]:
            self._other.merge(group)

    def _ranked(self) -> list[tuple[str, _Group]]:
        return sorted(self._groups.items(), key=lambda item: (-item[1].tokens, -item[1].asked_tokens, item[0]))


@dataclass(slots=True)
class _Stretch:
    count: int = 0
    total: float = 0.0
    peak: float = 0.0


class _Timeline:
    """Values by name and by stretch of time. The stretches are twice as long as soon as they would be too many."""

    def __init__(self, duration_s: float) -> None:
        self._width_s = duration_s / STRETCHES if duration_s > 0 else 1.0
        self._rows: dict[str, dict[int, _Stretch]] = {}

    def add(self, name: str, at_s: float, value: float) -> None:
        while at_s >= 2 * STRETCHES * self._width_s:
            self._widen()
        if name not in self._rows and len(self._rows) >= BANDS_KEPT:
            name = OTHER
        stretch = self._rows.setdefault(name, {}).setdefault(int(at_s / self._width_s), _Stretch())
        stretch.count += 1
        stretch.total += value
        stretch.peak = max(stretch.peak, value)

    def names(self) -> list[str]:
        return sorted(self._rows)

    def of(self, name: str) -> list[tuple[float, _Stretch]]:
        """The stretches that have a value, by the time at which they begin."""
        return [(index * self._width_s, stretch) for index, stretch in sorted(self._rows.get(name, {}).items())]

    def _widen(self) -> None:
        self._width_s *= 2
        for name, row in self._rows.items():
            wider: dict[int, _Stretch] = {}
            for index, stretch in row.items():
                into = wider.setdefault(index // 2, _Stretch())
                into.count += stretch.count
                into.total += stretch.total
                into.peak = max(into.peak, stretch.peak)
            self._rows[name] = wider
