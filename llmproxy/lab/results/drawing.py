"""How the plots of a report are drawn: one look for every policy, and SVG text that follows the page's colours.

This module needs the optional dependency matplotlib; only the plots import it.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, GRID, PAGE = "#1b1f24", "#6a737d", "#d8dee5", "#fefefe"
SERIES = "#0060c0", "#c8500a", "#00805a", "#a8447f", "#2f9ac6", "#a87900", "#7a4b2a"
"""Hues that people with the common colour blindnesses can tell apart; no two lines differ by hue alone."""
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAGE: "--page",
    **{hue: f"--c{i}" for i, hue in enumerate(SERIES)},
}
"""What stands in the SVG is the variable, so that the page's style sheet decides."""
DASHES: tuple[Any, ...] = ((0, (5, 1.6)), "-", (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1.2)))
MARKERS = "osD^vPX<>*h"
WIDTH_IN = 10.5
COLUMNS = 4
NAME_MAX = 34

_STYLE: Any = {
    "svg.fonttype": "path",  # letters as outlines take the same room on every machine
    "svg.hashsalt": "llmproxy",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.parse_math": False,  # a tenant may be called $1
    "axes.facecolor": "none",
    "axes.titlesize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.minor.size": 3.5,
    "xtick.minor.pad": 3.5,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
}


@dataclass(frozen=True, slots=True)
class PolicyStyle:
    """How one policy is drawn wherever it appears; `gid` is what the page finds it by."""

    policy: str
    gid: str
    color: str
    dash: Any
    width: float
    marker: str
    order: int

    @property
    def label(self) -> str:
        return short(self.policy)

    def plot(
        self, axes: Axes, x: Sequence[float], y: Sequence[float], *, marked: bool = False, step: bool = False
    ) -> None:
        axes.plot(
            x,
            y,
            color=self.color,
            linestyle=self.dash,
            linewidth=self.width,
            zorder=self.order,
            label=self.label,
            gid=self.gid,
            drawstyle="steps-post" if step else "default",
            marker=self.marker if marked else "None",
            markersize=4.5,
            markeredgewidth=0,
        )


def short(name: str) -> str:
    """A name that fits beside a plot, on one line."""
    name = " ".join(name.split())
    # A legend hides what begins with an underscore.
    name = f" {name}" if name.startswith("_") else name
    if len(name) <= NAME_MAX:
        return name
    # Variants of a policy differ at the end of their names, tenants often at the beginning.
    half = NAME_MAX // 2
    return f"{name[: half - 1]}…{name[-half:]}"


def add_title(axes: Axes, name: str) -> None:
    """Put a name above a panel, in letters that leave the next panel its room."""
    name = short(name)
    axes.set_title(name, loc="left", fontsize=9 if len(name) <= 24 else 7)


def lines_of(policies: Sequence[str], own: Collection[str], references: Collection[str]) -> dict[str, PolicyStyle]:
    """A look for every policy: own ones solid and thick in hues that no other has while there are enough of them."""
    ours = [policy for policy in policies if policy in own]
    others = [policy for policy in policies if policy not in own and policy not in references]
    spare = SERIES[len(ours) :] if len(ours) <= len(SERIES) // 2 else SERIES
    lines: dict[str, PolicyStyle] = {}
    for i, policy in enumerate(policies):
        gid, marker = f"series-{i}", MARKERS[i % len(MARKERS)]
        if policy in ours:
            rank = ours.index(policy)
            dash = "-" if rank < len(SERIES) else DASHES[rank % len(DASHES)]
            lines[policy] = PolicyStyle(policy, gid, SERIES[rank % len(SERIES)], dash, 2.6, marker, 4)
        elif policy in others:
            rank = others.index(policy)
            # Shifted by one in every round through the hues, or else the same pairs would come again.
            dash = DASHES[(rank + rank // len(spare)) % len(DASHES)]
            lines[policy] = PolicyStyle(policy, gid, spare[rank % len(spare)], dash, 1.3, marker, 3)
        else:
            lines[policy] = PolicyStyle(policy, gid, INK, (0, (1, 1)), 1.6, marker, 2)
    return lines


@contextmanager
def style() -> Iterator[None]:
    """The look of a report, whatever this machine's own settings of matplotlib are."""
    with mpl.rc_context(), warnings.catch_warnings():
        # Names of tenants come in every script; what the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(height_in: float) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="none")


def panels(names: Sequence[str], height_in: float) -> tuple[Figure, list[Axes]]:
    """One small panel for each name, as many in a row as fit, all with the same axes."""
    rows = math.ceil(len(names) / COLUMNS)
    columns = math.ceil(len(names) / rows)
    figure = new_figure(0.5 + height_in * rows + (0.6 if rows == 1 else 0.0))
    every = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for empty in every[len(names) :]:
        empty.remove()
    for lowest in every[max(0, len(names) - columns) : len(names)]:
        lowest.xaxis.set_tick_params(labelbottom=True)
    return figure, every[: len(names)]


def add_legend(figure: Figure, axes: Axes, most: Axes | None = None) -> None:
    handles, labels = (most or axes).get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside right upper", fontsize=8, labelspacing=0.45)
    for handle, source in zip(legend.legend_handles, handles, strict=True):
        if handle is not None and isinstance(source, Line2D):
            handle.set_gid(source.get_gid())


def percent_ticks(axis: Axis) -> None:
    """A few round percentages along `axis`."""
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))


def minor_label(axes: Axes) -> Callable[[float, int], str]:
    """Labels of a log axis between its decades, only where it is too short to show enough of those."""

    def label(value: float, _: int) -> str:
        low, high = axes.get_xlim()
        digit = round(value / 10 ** math.floor(math.log10(value) + 1e-9))
        wanted = (2, 5) if high / low < 300 else (3,) if high / low < 2_000 else ()
        return f"{value:g}" if digit in wanted else ""

    return label


def to_svg(figure: Figure, number: int) -> str:
    """An `svg` element to stand in a page. `number` tells apart the plots of a page, which share one space of names."""
    FigureCanvasSVG(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = re.sub(r'id="series-(\d+)"', r'class="series s\1"', svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>p{number}-", svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    root = f'<svg {view_box[0]} role="img" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"<svg [^>]*>", root, svg, count=1)
