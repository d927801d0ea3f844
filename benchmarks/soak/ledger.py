"""The calculations of the soak: the growth of memory, and whether client and proxy agree about each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import linear_regression

Samples = Sequence[tuple[float, float]]  # Pairs of seconds and a value, in order of time.
HOUR_S = 3600.0
SHOWN_MAX = 20  # The maximum number of problems that are listed. Further problems are only counted.


def slope_per_hour(samples: Samples) -> float:
    """Returns the growth of a value by least squares, in its unit per hour; 0 with fewer than two times."""
    times_s = [at_s for at_s, _ in samples]
    return HOUR_S * linear_regression(times_s, [value for _, value in samples]).slope if len(set(times_s)) > 1 else 0.0


def second_half(samples: Samples) -> Samples:
    """Returns the samples in the second half of their time."""
    if not samples:
        return samples
    middle_s = (samples[0][0] + samples[-1][0]) / 2.0
    return [(at_s, value) for at_s, value in samples if at_s >= middle_s]


class End(StrEnum):
    """How a request ended for its client."""

    WHOLE = "whole"
    REFUSED = "an error"
    BROKEN = "broken"
    """The client got 200, and then an error event or an answer that was cut."""
    LEFT = "left"
    UNSENT = "left before anything was sent"
    LOST = "lost"
    """The connection ended without an answer, or no answer ended in time."""


@dataclass(frozen=True, slots=True)
class View:
    """A request as its client saw it. `status` is None if no answer came, and `detail` is a text for people."""

    end: End
    status: int | None = None
    detail: str = ""


def agree(view: View, outcome: str, status: int) -> bool:
    """Returns whether the client's view of a request fits the proxy's log line."""
    if view.end in (End.LEFT, End.UNSENT):
        # The answer may have ended in any way at the moment when its client left.
        return outcome != "internal"
    if view.end is End.WHOLE:
        return outcome == "completed" and status == 200
    if view.end is End.BROKEN:
        return outcome in ("broken_stream", "upstream_status")
    if view.end is End.REFUSED:
        return status == view.status and outcome not in ("completed", "cancelled", "broken_stream", "internal")
    return False


@dataclass(slots=True)
class Ledger:
    """Every request by its id: it must be sent once, end once for its client, and be logged once by the proxy."""

    sent: int = 0
    ends: Counter[End] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[End, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _open: dict[str, View | None] = field(default_factory=dict)
    _logged: dict[str, tuple[str, int]] = field(default_factory=dict)

    def send(self, request_id: str) -> None:
        self.sent += 1
        self._open[request_id] = None

    def end(self, request_id: str, view: View) -> None:
        """Notes how a request ended for its client."""
        self.ends[view.end] += 1
        if request_id in self._logged:
            self._match(request_id, view, *self._logged.pop(request_id))
        else:
            self._open[request_id] = view

    def log(self, request_id: str, outcome: str, status: int) -> None:
        """Notes the proxy's log line of a request."""
        self.outcomes[outcome] += 1
        if request_id not in self._open or request_id in self._logged:
            self.problems.append(f"{request_id}: logged as {outcome} again, or never sent")
            return
        view = self._open[request_id]
        if view is None:
            self._logged[request_id] = outcome, status
        else:
            self._match(request_id, view, outcome, status)

    def _match(self, request_id: str, view: View, outcome: str, status: int) -> None:
        del self._open[request_id]
        self.pairs[view.end, outcome] += 1
        if not agree(view, outcome, status):
            self.problems.append(f"{request_id}: logged as {outcome} {status}, and its client saw {view}")

    @property
    def silent(self) -> int:
        """Returns the number of requests that have ended for their client and are not logged yet."""
        return sum(view is not None and view.end is not End.UNSENT for view in self._open.values())

    def closed(self, counted: Mapping[str, int]) -> list[str]:
        """Returns all problems after the last request. `counted` are the proxy's metrics by outcome."""
        problems = list(self.problems)
        for request_id, view in self._open.items():
            if view is None:
                problems.append(f"{request_id}: never ended for its client")
            elif view.end is not End.UNSENT:
                problems.append(f"{request_id}: never logged by the proxy; its client saw {view}")
        if +Counter(counted) != +self.outcomes:
            problems.append(f"counted by metrics {dict(counted)}, logged in lines {dict(self.outcomes)}")
        unsent = sum(view is not None and view.end is End.UNSENT for view in self._open.values())
        if sum(counted.values()) != self.sent - unsent:
            problems.append(f"{self.sent - unsent} requests sent, {sum(counted.values())} outcomes counted")
        left_out = len(problems) - SHOWN_MAX
        return problems if left_out <= 0 else [*problems[:SHOWN_MAX], f"and {left_out} more"]


def left_over(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Returns the names whose count is larger than before, with the difference."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
