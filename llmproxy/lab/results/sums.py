"""Sums over requests: by group, by replica, and by time interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from llmproxy.core.domain import Outcome, Predicted
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.result import GroupResult, Quantiles
from llmproxy.lab.results.sketch import Sketch

OTHER = "(other)"
BANDS_KEPT = 64
STRETCHES = 60

REFUSALS = frozenset(Outcome) - {
    *(Outcome.COMPLETED, Outcome.CANCELLED, Outcome.CONNECT_FAILED, Outcome.UPSTREAM_TIMEOUT),
    *(Outcome.UPSTREAM_STATUS, Outcome.BROKEN_STREAM, Outcome.INTERNAL),
}
"""Outcomes of requests that were refused or left the queue, without a failure of a backend."""


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def quantiles(sketch: Sketch) -> Quantiles:
    return Quantiles(
        mean=sketch.mean, **{f"p{percent}": sketch.quantile(percent / 100) for percent in (50, 90, 95, 99)}
    )


@dataclass(slots=True)
class BackendSums:
    """The requests and tokens of one replica in a run. `hit_tokens` are prompt tokens from the prefix cache."""

    requests: int = 0
    prefill_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    engine_preemptions: int = 0

    def add(self, record: Record) -> None:
        self.requests += 1
        # Without a first token, the computed part of the prompt is unknown.
        if record.hit_tokens is not None:
            self.output_tokens += record.output_tokens

    def add_prompt(self, record: Record) -> None:
        if record.hit_tokens is not None:
            self.prefill_tokens += record.arrival.prompt_tokens - record.hit_tokens
            self.hit_tokens += record.hit_tokens


@dataclass(slots=True)
class Group:
    """Counts and sums of a run over all requests, or over the requests of one band or tenant."""

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
        self.hit_tokens += record.hit_tokens or 0
        self.output_tokens += record.output_tokens
        for sketch, value in (
            (self.ttft, record.ttft_s),
            (self.tpot, record.tpot_s),
            (self.queue_wait, record.queue_wait_s),
        ):
            if value is not None:
                sketch.add(value)

    def merge(self, other: Group) -> None:
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, Sketch):
                mine.merge(theirs)
            else:
                setattr(self, one.name, mine + theirs)

    def figures(self) -> dict[str, Any]:
        """Returns the fields that a group and a whole run have in common."""
        return {
            "offered": self.offered,
            "completed": self.completed,
            "refused": self.refused,
            "failed": self.failed,
            "goodput": ratio(self.met, self.offered),
            "ttft_s": quantiles(self.ttft),
            "tpot_s": quantiles(self.tpot),
            "queue_wait_s": quantiles(self.queue_wait),
        }

    def result(self, total: Group) -> GroupResult:
        return GroupResult(
            **self.figures(),
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            output_tokens=self.output_tokens,
            token_share=ratio(self.tokens, total.tokens),
            asked_share=ratio(self.asked_tokens, total.asked_tokens),
        )


@dataclass(slots=True)
class PredictionErrors:
    """Errors of the predictions of one latency: mean relative error, and share of answers within the predicted p90."""

    count: int = 0
    error_ratios: float = 0.0
    covered: int = 0

    def add(self, predicted: Predicted | None, observed_s: float | None) -> None:
        """Counts an answer if its time was predicted and observed."""
        if predicted is None or observed_s is None or observed_s <= 0.0:
            return
        self.count += 1
        self.error_ratios += predicted.error_ratio(observed_s)
        self.covered += predicted.covers(observed_s)


class Groups:
    """The groups of the bands or tenants, by name: at most `kept`, and one group for all other names."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._groups: dict[str, Group] = {}
        self._other = Group()

    def group(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) >= self._kept:
                self._forget_all_but(self._kept // 2)
            group = self._groups[name] = Group()
        return group

    def largest(self, count: int) -> Iterator[tuple[str, Group]]:
        """Yields the `count` largest groups by tokens, and then one group with all others, if any."""
        rest = Group()
        rest.merge(self._other)
        for rank, (name, group) in enumerate(self._ranked()):
            if rank < count:
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

    def _ranked(self) -> list[tuple[str, Group]]:
        return sorted(self._groups.items(), key=lambda item: (-item[1].tokens, -item[1].asked_tokens, item[0]))


@dataclass(slots=True)
class Stretch:
    count: int = 0
    total: float = 0.0


class Timeline:
    """Values per time interval. The length of the intervals doubles when there are too many."""

    def __init__(self, duration_s: float) -> None:
        self.width_s = duration_s / STRETCHES if duration_s > 0 else 1.0
        self._row: dict[int, Stretch] = {}

    def add(self, at_s: float, value: float) -> None:
        while at_s >= 2 * STRETCHES * self.width_s:
            self._widen()
        stretch = self._row.setdefault(int(at_s / self.width_s), Stretch())
        stretch.count += 1
        stretch.total += value

    def intervals(self) -> list[tuple[float, Stretch]]:
        """Returns (begin, interval) of the intervals with values."""
        return [(index * self.width_s, stretch) for index, stretch in sorted(self._row.items())]

    def _widen(self) -> None:
        self.width_s *= 2
        narrow, self._row = self._row, {}
        for index, stretch in narrow.items():
            into = self._row.setdefault(index // 2, Stretch())
            into.count += stretch.count
            into.total += stretch.total
