"""The number of prefill replicas: one trace on a fleet in all divisions into prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmproxy.lab.results.objectives import Wanted
from llmproxy.lab.results.result import RunResult
from llmproxy.lab.results.sizes import mean_of
from llmproxy.lab.results.table import MISSING, milliseconds, seconds

NEAR = 0.005
"""Differences of goodput up to this are chance."""
NOTE = (
    "Kept: share of all offered requests that kept the objectives; a refusal or a failure is a miss. Split: share of "
    "them in two stages. TTFT in seconds, TPOT in milliseconds. Wants: replicas for prompts by the work that the proxy "
    "saw. Bold: the best, and divisions that are as good."
)


class Split(NamedTuple):
    """A division under a policy: means over seeds. With `prefill` 0, all replicas do both.

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
        """The division with the largest goodput, and the divisions within `NEAR` of it."""
        most = max(row.kept for row in self.rows)
        return [row for row in self.rows if row.kept >= most - NEAR]

    def advice(self, wanted: Wanted) -> str:
        """Returns a sentence with the best division."""
        row = max(self.best, key=lambda one: one.kept)
        said = f"{_division(row)} {wanted} for {row.kept:.1%} of requests"
        return f"{said}, and no division for more." if len(self.best) == 1 else f"{said}; others are as good."


def _division(row: Split) -> str:
    if not row.prefill:
        return f"{row.decode} replicas that do both keep"
    return f"{row.prefill} for prompts and {row.decode} for answers keep"


def splits_of(runs: Sequence[tuple[str, int, RunResult]]) -> list[Splits]:
    """Returns the tables of runs, each with the plain name of its policy and its prefill replicas."""
    groups: dict[str, dict[int, list[RunResult]]] = {}
    loads = {(run.rate_scale, run.prefill_scale) for _, _, run in runs}
    for policy, prefill, run in runs:
        load = f", rate x{run.rate_scale:g}, prefill x{run.prefill_scale:g}" if len(loads) > 1 else ""
        groups.setdefault(policy + load, {}).setdefault(prefill, []).append(run)
    return [Splits(name, [_split(prefill, rows[prefill]) for prefill in sorted(rows)]) for name, rows in groups.items()]


def _split(prefill: int, runs: Sequence[RunResult]) -> Split:
    replicas = len(runs[0].by_backend)
    share = mean_of([run.prefill_share for run in runs])
    return Split(
        prefill,
        replicas - prefill,
        fmean(run.goodput or 0.0 for run in runs),
        fmean(run.split / run.offered if run.offered else 0.0 for run in runs),
        mean_of([run.ttft_s.p99 for run in runs]),
        mean_of([run.tpot_s.p99 for run in runs]),
        None if share is None else replicas * share,
    )


def print_splits(found: Sequence[Splits], wanted: Wanted, console: Console) -> None:
    """Print a table for each policy and load, with the advice below it."""
    for splits in found:
        table = Table(title=splits.name, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for title in ("prompts", "answers", "kept", "split", "TTFT\np99", "TPOT\np99", "wants"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in splits.rows:
            cells = (
                f"{row.prefill}" if row.prefill else "both", f"{row.decode}", f"{row.kept:.1%}", f"{row.split:.0%}",
                MISSING if row.ttft_p99_s is None else seconds(row.ttft_p99_s),
                MISSING if row.tpot_p99_s is None else milliseconds(row.tpot_p99_s),
                MISSING if row.wants is None else f"{row.wants:.1f}",
            )  # fmt: skip
            table.add_row(*cells, style="bold" if row in splits.best else "")
        console.print(table)
        console.print(Text(splits.advice(wanted)))
    console.print(Text(NOTE, style="dim"))
