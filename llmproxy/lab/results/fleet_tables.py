"""Tables of one trace on fleets of several sizes: how many replicas are enough."""

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
from llmproxy.lab.results.table import MISSING, milliseconds, padding, seconds

HOUR_S = 3_600.0
THOUSAND = 1_000.0
SIZES_NOTE = (
    "Kept: share of all offered requests that kept the objectives; a refusal or a failure is a miss. TTFT in seconds, "
    "TPOT in milliseconds, hours of replicas for 1,000 requests that kept them. Bold: enough."
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


def sizes_of(runs: Sequence[tuple[str, RunResult]]) -> list[Sizes]:
    """Groups runs, each with the name of its policy, by policy and load, and then by the size of their fleet."""
    groups: dict[str, dict[int, list[RunResult]]] = {}
    loads = {(run.rate_scale, run.prefill_scale) for _, run in runs}
    for policy, run in runs:
        load = f", rate x{run.rate_scale:g}, prefill x{run.prefill_scale:g}" if len(loads) > 1 else ""
        groups.setdefault(policy + load, {}).setdefault(len(run.by_backend), []).append(run)
    return [Sizes(name, [_size(*row) for row in sorted(rows.items())]) for name, rows in groups.items()]


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
        replicas * sum(run.counted_s for run in runs) / HOUR_S / good * THOUSAND if good else None,
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
                MISSING if row.ttft_p99_s is None else seconds(row.ttft_p99_s),
                MISSING if row.tpot_p99_s is None else milliseconds(row.tpot_p99_s),
                f"{row.refused:.1%}", MISSING if row.hours is None else f"{row.hours:.3f}",
            )
            for row in sizes.rows
        ]  # fmt: skip
        bold = [row.kept >= wanted.share for row in sizes.rows]
        _print(console, sizes.name, titles, zip(rows, bold, strict=True), sizes.advice(wanted))
    console.print(Text(SIZES_NOTE, style="dim"))


def _print(
    console: Console, name: str, titles: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]], advice: str
) -> None:
    table = Table(title=name, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=padding(console.width))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for cells, bold in rows:
        table.add_row(*cells, style="bold" if bold else "")
    console.print(table)
    console.print(Text(advice))
