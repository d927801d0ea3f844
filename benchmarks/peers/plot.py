"""One picture of a run: what each proxy costs and adds in each case, median and spread over the rounds.

This module needs the optional dependency matplotlib.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.peers.cases import Case
from benchmarks.peers.competitors import PEERS
from benchmarks.peers.table import DIRECT, Round, figures, kept, values
from benchmarks.peers.table import Figure as Column
from llmproxy.lab.results.drawing import INK, MUTED, SERIES, WIDTH_IN, log_ticks, style

PEER_NAMES = frozenset(peer.name for peer in PEERS)
ROW_IN = 0.19
"""Height of one proxy in a panel."""
SMALLEST_US = 1.0
"""What is less than that, or nothing at all, is drawn here: the axis is a logarithm."""


def draw(cases: Sequence[Case], results: Mapping[str, Sequence[Round]], path: Path) -> None:
    """Writes the picture as SVG. Raises OSError when the file cannot be written."""
    drawn = {
        case: [column for column in figures(case) if column.ratio and column.name.endswith("µs")] for case in cases
    }
    proxies = [
        name for name in dict.fromkeys(n for case in cases for r in results[case.name] for n in r) if name != DIRECT
    ]
    with style():
        height = 0.75 + ROW_IN * len(proxies)
        picture = Figure(figsize=(WIDTH_IN, height * len(cases)), layout="constrained")
        FigureCanvasSVG(picture)
        grid = picture.subplots(len(cases), max(len(columns) for columns in drawn.values()), squeeze=False)
        for row, (case, columns) in zip(grid, drawn.items(), strict=True):
            for axes in row[len(columns) :]:
                axes.remove()
            for axes, column in zip(row, columns, strict=False):
                _panel(axes, column, kept(results[case.name]), proxies)
            row[0].set_title(f"{case.name}: {case.title}", loc="left", fontsize=8)
            row[0].set_yticks(range(len(proxies)), proxies)
        picture.savefig(path, facecolor="white")


def _panel(axes: Axes, column: Column, rounds: Sequence[Round], proxies: Sequence[str]) -> None:
    for place, name in enumerate(proxies):
        amounts = [max(SMALLEST_US, amount) for amount in values(column, rounds, name)]
        if amounts:
            color = MUTED if name.partition("@")[0] in PEER_NAMES else SERIES[0]
            middle = statistics.median(amounts)
            axes.plot([min(amounts), max(amounts)], [place, place], color=color, linewidth=1.5)
            axes.plot([middle], [place], marker="o", markersize=4, color=color)
            axes.annotate(f"{middle:,.3g}" if middle < 1000 else f"{middle:,.0f}", (middle, place), (0, 3),
                          textcoords="offset points", fontsize=5.5, color=INK, ha="center")  # fmt: skip
    log_ticks(axes)
    axes.margins(x=0.1)
    axes.set_xlabel(column.name, fontsize=7)
    axes.tick_params(which="both", labelsize=6.5)
    axes.set_yticks(range(len(proxies)), [""] * len(proxies))
    axes.set_ylim(len(proxies) - 0.4, -0.8)
