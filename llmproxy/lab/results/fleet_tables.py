"""Tables of one trace on several fleets: how many replicas are enough, and how many of them for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmproxy.lab.results.objectives import Wanted
from llmproxy.lab.results.result import RunResult, mean_of
from llmproxy.lab.results.table import MISSING, milliseconds, seconds

HOUR_S = 3_600.0
THOUSAND = 1_000.0
NEAR = 0.005  # Differences of goodput up to this are chance.
KEPT_NOTE = "Kept: share of all offered requests that kept the objectives; a refusal or a failure is a miss."
SIZES_NOTE = (
    f"{KEPT_NOTE} TTFT in seconds, "
    "TPOT in milliseconds, hours of replicas for 1,000 requests that kept them. Bold: enough."
)
SPLITS_NOTE = (
    f"{KEPT_NOTE} Split: share of "
    "them in two stages. TTFT in seconds, TPOT in milliseconds. Wants: replicas for prompts by the work that the proxy "
    "saw. Bold: the best, and divisions that are as good."
)


class Size(NamedTuple):
    """Fleets of one size under one policy: means over seeds. Shares are of all offered requests, 0..1.

    `hours` are replica-hours per 1,000 requests that met their objectives; None without such requests.
    """

    replicas: int
    kept: float
    by_band: dict[str, float]
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    refused: float
    hours: float | None


class Sizes(NamedTuple):
    """All sizes under one policy at one load, the smallest first."""

    name: str
    rows: list[Size]

    def advice(self, wanted: Wanted) -> str:
        """Returns a sentence with the number of replicas that are enough."""
        enough = next((row for row in self.rows if row.kept >= wanted.share), None)
        if enough is None:
            last = self.rows[-1]
            return f"{_replicas(last.replicas)} {wanted} for {last.kept:.1%} of requests: not {wanted.share:.1%}."
        said = f"{_replicas(enough.replicas)} {wanted} for {enough.kept:.1%} of requests."
        before = [row for row in self.rows if row.replicas < enough.replicas]
        return f"{said} {_replicas(before[-1].replicas)} it for {before[-1].kept:.1%}." if before else said


def _replicas(count: int) -> str:
    return "1 replica keeps" if count == 1 else f"{count} replicas keep"


class Split(NamedTuple):
    """A division of a fleet into prefill and decode replicas: means over seeds. `prefill` 0: all replicas do both.

    `wants` is the number of prefill replicas that `/scale` recommends for this fleet size; None if unknown.
    """

    prefill: int
    decode: int
    kept: float
    split: float
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    wants: float | None


class Splits(NamedTuple):
    """All divisions under one policy at one load, the fewest prefill replicas first."""

    name: str
    rows: list[Split]

    @property
    def best(self) -> list[Split]:
        """The division with the largest goodput, and all divisions within `NEAR` of it."""
        most = max(row.kept for row in self.rows)
        return [row for row in self.rows if row.kept >= most - NEAR]

    def advice(self, wanted: Wanted) -> str:
        """Returns a sentence that names the division with the most requests in time, and their share."""
        row = max(self.best, key=lambda one: one.kept)
        said = f"{_division(row)} {wanted} for {row.kept:.1%} of requests"
        return f"{said}, and no division for more." if len(self.best) == 1 else f"{said}; others are as good."


def _division(row: Split) -> str:
    if not row.prefill:
        return f"{row.decode} replicas that do both keep"
    return f"{row.prefill} for prompts and {row.decode} for answers keep"


def _grouped(runs: Sequence[tuple[str, int, RunResult]]) -> list[tuple[str, list[tuple[int, list[RunResult]]]]]:
    """Groups runs by (policy and load), and then by their number, in ascending order."""
    groups: dict[str, dict[int, list[RunResult]]] = {}
    loads = {(run.rate_scale, run.prefill_scale) for _, _, run in runs}
    for policy, number, run in runs:
        load = f", rate x{run.rate_scale:g}, prefill x{run.prefill_scale:g}" if len(loads) > 1 else ""
        groups.setdefault(policy + load, {}).setdefault(number, []).append(run)
    return [(name, sorted(rows.items())) for name, rows in groups.items()]


def sizes_of(runs: Sequence[tuple[str, RunResult]]) -> list[Sizes]:
    groups = _grouped([(policy, len(run.by_backend), run) for policy, run in runs])
    return [Sizes(name, [_size(*row) for row in rows]) for name, rows in groups]


def splits_of(runs: Sequence[tuple[str, int, RunResult]]) -> list[Splits]:
    return [Splits(name, [_split(*row) for row in rows]) for name, rows in _grouped(runs)]


def _size(replicas: int, runs: Sequence[RunResult]) -> Size:
    bands = {band for run in runs for band in run.by_band}
    kept = fmean(run.goodput or 0.0 for run in runs)
    good = sum((run.goodput or 0.0) * run.offered for run in runs)
    return Size(
        replicas,
        kept,
        {band: fmean(run.by_band[band].goodput or 0.0 for run in runs if band in run.by_band) for band in bands},
        mean_of(run.ttft_s.p99 for run in runs),
        mean_of(run.tpot_s.p99 for run in runs),
        fmean(run.refused / run.offered if run.offered else 0.0 for run in runs),
        replicas * sum(run.duration_s for run in runs) / HOUR_S / good * THOUSAND if good else None,
    )


def _split(prefill: int, runs: Sequence[RunResult]) -> Split:
    replicas = len(runs[0].by_backend)
    share = mean_of(run.prefill_share for run in runs)
    return Split(
        prefill,
        replicas - prefill,
        fmean(run.goodput or 0.0 for run in runs),
        fmean(run.split / run.offered if run.offered else 0.0 for run in runs),
        mean_of(run.ttft_s.p99 for run in runs),
        mean_of(run.tpot_s.p99 for run in runs),
        None if share is None else replicas * share,
    )


def print_sizes(found: Sequence[Sizes], wanted: Wanted, console: Console) -> None:
    """Prints a table for each policy and load, with the advice below it."""
    for sizes in found:
        bands = sorted({band for row in sizes.rows for band in row.by_band})
        shown = bands if len(bands) > 1 else []
        titles = ("repli-\ncas", "kept", *shown, "TTFT\np99", "TPOT\np99", "re-\nfused", "hours")
        rows = [
            (
                f"{row.replicas}", f"{row.kept:.1%}", *(f"{row.by_band.get(band, 0.0):.1%}" for band in shown),
                *_latencies(row), f"{row.refused:.1%}", MISSING if row.hours is None else f"{row.hours:.3f}",
            )
            for row in sizes.rows
        ]  # fmt: skip
        bold = [row.kept >= wanted.share for row in sizes.rows]
        _print(console, sizes.name, titles, zip(rows, bold, strict=True), sizes.advice(wanted))
    console.print(Text(SIZES_NOTE, style="dim"))


def print_splits(found: Sequence[Splits], wanted: Wanted, console: Console) -> None:
    """Prints a table for each policy and load, with the advice below it."""
    for splits in found:
        titles = ("prompts", "answers", "kept", "split", "TTFT\np99", "TPOT\np99", "wants")
        rows = [
            (
                f"{row.prefill}" if row.prefill else "both", f"{row.decode}", f"{row.kept:.1%}", f"{row.split:.0%}",
                *_latencies(row), MISSING if row.wants is None else f"{row.wants:.1f}",
            )
            for row in splits.rows
        ]  # fmt: skip
        bold = [row in splits.best for row in splits.rows]
        _print(console, splits.name, titles, zip(rows, bold, strict=True), splits.advice(wanted))
    console.print(Text(SPLITS_NOTE, style="dim"))


def _latencies(row: Size | Split) -> tuple[str, str]:
    return (
        MISSING if row.ttft_p99_s is None else seconds(row.ttft_p99_s),
        MISSING if row.tpot_p99_s is None else milliseconds(row.tpot_p99_s),
    )


def _print(
    console: Console, name: str, titles: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]], advice: str
) -> None:
    table = Table(title=name, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for cells, bold in rows:
        table.add_row(*cells, style="bold" if bold else "")
    console.print(table)
    console.print(Text(advice))
