"""The results as a table for a terminal, 80 columns wide or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmproxy.lab.results.result import REFERENCES, Bound, LoadPoint, Row, SimulationResult, best, load_points

NOTE = (
    "Goodput is of all offered requests: a refusal or a failure is a miss. Latencies are of completed requests, "
    "in seconds, TPOT in milliseconds. Bold: best of its column."
)
ORACLE_NOTE = (
    "The oracle knows lengths, caches and engines, but makes the best choice for each request alone: a policy that "
    "keeps caches warm for later requests may beat it. No policy can beat a strict bound."
)
MISSING = "-"
LOADS_ACROSS = 5  # Number of loads whose bounds fit side by side in 80 columns.


class Column(NamedTuple):
    """A figure of a row: its name in two lines, the field of `Row`, and the format."""

    title: str
    field: str
    write: Callable[[float], str]


def seconds(value: float) -> str:
    """Formats seconds with three digits: at most five characters below 100,000 s."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.9995 else f"{value:.3f}"


def milliseconds(value: float) -> str:
    value *= 1000
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


COLUMNS = (
    Column("good-\nput", "goodput", "{:.1%}".format),
    Column("TTFT\np50", "ttft_p50_s", seconds),
    Column("TTFT\np99", "ttft_p99_s", seconds),
    Column("TPOT\np50", "tpot_p50_s", milliseconds),
    Column("TPOT\np99", "tpot_p99_s", milliseconds),
    Column("queue\np99", "queue_wait_p99_s", seconds),
    Column("hit", "hit", "{:.1%}".format),
    Column("imba-\nlance", "imbalance", "{:.2f}".format),
    Column("re-\nfused", "refused", "{:.1%}".format),
    Column("fail-\ned", "failed", "{:.1%}".format),
)


def write(column: Column, row: Row) -> str:
    """Returns the formatted figure of `row` in `column`."""
    value = getattr(row, column.field)
    return MISSING if value is None else column.write(value)


def is_best(column: Column, row: Row, point: LoadPoint) -> bool:
    """Returns whether `row` has the best figure of `point` in `column`, unless most policies have the same figure."""
    rivals = [row for row in point.rows if row.policy not in REFERENCES]
    winner = best(rivals, column.field)
    if winner is None:
        return False
    winners = [rival for rival in rivals if write(column, rival) == column.write(winner)]
    return row in winners and 2 * len(winners) <= len(rivals)


def print_tables(result: SimulationResult, console: Console) -> None:
    """Prints a table for each load, and then the bounds of all loads."""
    points = load_points(result)
    if not points:
        console.print("Nothing was run.")
        return
    for point in points:
        console.print(_table(point, console.width))
    console.print(Text(NOTE, style="dim"))
    if has_oracle(points):
        console.print(Text(ORACLE_NOTE, style="dim"))
    bounded = [point for point in points if point.bounds]
    for first in range(0, len(bounded), LOADS_ACROSS):
        console.print(_bounds(bounded[first : first + LOADS_ACROSS]))
    for name, bound in bounds_by_name(points).items():
        console.print(Text(f"{name}: {bound.about}", style="dim"))


def has_oracle(points: Sequence[LoadPoint]) -> bool:
    return any(row.policy == "oracle" for point in points for row in point.rows)


def bounds_by_name(points: Sequence[LoadPoint]) -> dict[str, Bound]:
    """Maps names to bounds, over all loads, for their units and meanings."""
    return {name: bound for point in reversed(points) for name, bound in point.bounds.items()}


def heading(point: LoadPoint) -> str:
    seeds = max(row.seeds for row in point.rows)
    return point.label + (f", mean of {seeds} seeds" if seeds > 1 else "")


def padding(width: int) -> tuple[int, int]:
    """Returns the padding of the cells of a table in a console of this width."""
    return (0, 1 if width >= 100 else 0)


def _table(point: LoadPoint, width: int) -> Table:
    table = Table(
        title=heading(point), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=padding(width)
    )
    table.add_column("policy", overflow="fold")
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in point.rows:
        cells = [Text(write(column, row), style="bold" if is_best(column, row, point) else "") for column in COLUMNS]
        table.add_row(Text(row.policy), *cells, style="italic" if row.policy in REFERENCES else "")
    return table


def _bounds(points: Sequence[LoadPoint]) -> Table:
    """Returns a table with a row for each bound and a column for each load."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("bound", overflow="fold")
    table.add_column("unit", no_wrap=True)
    for point in points:
        table.add_column(f"rate {point.rate_scale:g}\nprefill {point.prefill_scale:g}", justify="right", no_wrap=True)
    for name, bound in bounds_by_name(points).items():
        table.add_row(Text(name), Text(bound.unit), *(bound_value(point.bounds.get(name)) for point in points))
    return table


def bound_value(bound: Bound | None) -> str:
    """Formats the value of a bound with four digits."""
    if bound is None or bound.value is None:
        return MISSING
    return f"{bound.value:.4g}" if bound.value < 10_000 else f"{bound.value:,.0f}"
