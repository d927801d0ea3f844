"""What the validations of the laboratory share: percentiles, and tables that say what broke."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmproxy.lab.traces.arrival import Arrival, Trace


def trace_of(name: str, arrivals: Sequence[Arrival], block_tokens: int) -> Trace:
    """Arrivals that are at hand anyway, as a trace."""
    return Trace(name, lambda: iter(arrivals), block_tokens)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0..1) of `values` do not exceed, by linear interpolation; ValueError where none is."""
    if not values:
        raise ValueError("no value to take a percentile of: every request of this part failed")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Check:
    """A figure beside what it should be; `band` is the relative error that is allowed, None where none is promised."""

    what: str
    expected: float
    found: float
    band: float | None

    @property
    def error(self) -> float:
        """How much more was found than expected, relatively."""
        return self.found / self.expected - 1.0

    @property
    def broken(self) -> bool:
        return self.band is not None and abs(self.error) > self.band

    @property
    def verdict(self) -> str:
        return "" if self.band is None else f"{'BROKEN' if self.broken else 'ok'} (band {self.band:.0%})"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A markdown table, its columns padded so that a terminal shows them straight."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in (head, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |", flush=True)
    print(flush=True)


def report_broken(checks: Sequence[Check]) -> int:
    """Name what is outside its band; the exit status: 1 where anything is."""
    broken = [check for check in checks if check.broken]
    for check in broken:
        print(f"BROKEN: {check.what}: {check.found:.4g} instead of {check.expected:.4g} ({check.error:+.1%}),"
              f" band {check.band:.0%}")  # fmt: skip
    promised = sum(check.band is not None for check in checks)
    print(f"{promised - len(broken)} of {promised} figures with a band are inside it")
    return 1 if broken else 0
