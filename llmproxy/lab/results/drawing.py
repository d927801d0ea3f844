"""The style of the laboratory's plots: colours, names, legends, and SVG in the colours of the page.

This module needs the optional dependency matplotlib.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK, MUTED, GRID, PAGE = "#1b1f24", "#6a737d", "#d8dee5", "#fefefe"
SERIES = "#0060c0", "#c8500a", "#00805a", "#a8447f", "#2f9ac6", "#a87900", "#7a4b2a"
"""Hues that people with common colour blindnesses can distinguish. No two lines differ by hue alone."""
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAGE: "--page"} | {
    h: f"--c{SERIES.index(h)}" for h in SERIES
}
"""The CSS variable that replaces each colour in the SVG, so that the page's style sheet sets it."""
WIDTH_IN = 10.5
NAME_MAX = 34
_STYLE: Any = {
    "svg.fonttype": "path",  # letters as outlines take the same room on every machine
    "svg.hashsalt": "llmproxy",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.parse_math": False,  # a tenant may be called $1
    "axes.facecolor": "none",
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 3.2,
    "legend.labelspacing": 0.45,
}


@contextmanager
def style() -> Iterator[None]:
    """Sets the matplotlib style of a report, independent of the settings of this machine."""
    with mpl.rc_context(), warnings.catch_warnings():
        # Tenants may have names in any script. A missing glyph is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(height_in: float) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="none")


def short(name: str) -> str:
    """Shortens a name to one line beside a plot.

    A long name loses its middle: variants of a policy differ at the end, and tenants often at the beginning.
    """
    name = " ".join(name.split())
    # A legend hides names that begin with an underscore.
    name = f" {name}" if name.startswith("_") else name
    return name if len(name) <= NAME_MAX else f"{name[: NAME_MAX // 2 - 1]}…{name[-NAME_MAX // 2 :]}"


def add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside right upper")
    for handle, source in zip(legend.legend_handles, handles, strict=True):
        if handle is not None and isinstance(source, Line2D):
            handle.set_gid(source.get_gid())


def to_svg(figure: Figure, number: int) -> str:
    """Returns an `svg` element for a page. `number` makes the ids of the plots of one page distinct."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue().partition("<svg")[2]
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = re.sub(r'id="series-(\d+)"', r'class="series s\1"', svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>p{number}-", svg)
    # The page sets the size.
    return re.sub(
        r'^[^>]*(viewBox="[^"]*")[^>]*>',
        r'<svg \1 role="img" xmlns:xlink="http://www.w3.org/1999/xlink">',
        svg,
        count=1,
    )
