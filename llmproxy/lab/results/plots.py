"""The plots of a report, drawn with matplotlib.

This module needs the optional dependency matplotlib; only the report imports it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from llmproxy.core.domain import BAND_NAMES
from llmproxy.lab.results.drawing import GRID, INK, MUTED, PAGE, SERIES, add_legend, log_ticks, new_figure, short
from llmproxy.lab.results.result import (
    REFERENCES,
    LoadPoint,
    Point,
    RunResult,
    SimulationResult,
    Trail,
    load_points,
    policies_of,
)
from llmproxy.lab.results.sums import OTHER

HIT_BOUND = "hit_pooled_lru"
"""The bound that is a hit ratio."""
WAIT_MIN_S = 0.001
"""Waits below this count as no wait."""
DASHES: tuple[Any, ...] = ((0, (5, 1.6)), "-", (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1.2)))
BOUND_STYLE: Any = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 2))}
LABEL: Any = {
    "textcoords": "offset points", "bbox": {"facecolor": PAGE, "edgecolor": "none", "pad": 0.8}, "zorder": 6
}  # fmt: skip
MARKERS = "osD^vPX<>*h"
PANELS_ACROSS = 4


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure and its caption. Without a figure, the caption says why there is none."""

    title: str
    caption: str
    figure: Figure | None = None


@dataclass(frozen=True, slots=True)
class _Data:
    points: list[LoadPoint]
    # Keyword arguments of each policy's line. The page finds a line by its `gid`.
    looks: dict[str, dict[str, Any]]
    # The load of the plots that show a single load.
    at: LoadPoint
    # The runs at this load with one seed and a trail.
    shown: list[tuple[RunResult, Trail]]

    def plot(self, title: str, text: str, figure: Figure, drawn: Collection[str], missing: str = "") -> Plot:
        """Returns a plot. Its caption names the shown run, and the policies that are not `drawn`, with the reason."""
        absent = [run.policy for run, _ in self.shown if run.policy not in drawn]
        reason = f" Not shown, because they {missing}: {', '.join(absent)}." if absent else ""
        return Plot(title, f"{text} At {self.at.label}, seed {self.shown[0][0].seed}.{reason}", figure)


def draw_all(result: SimulationResult, trails: Mapping[Point, Trail], own: Collection[str]) -> list[Plot]:
    """Returns all plots of a report in order; none for a result without runs. Call it within `style`."""
    if not result.runs:
        return []
    points = load_points(result)
    at = max(points, key=_goodput_spread)
    data = _Data(points, _looks(policies_of(result), own), at, _shown(result, trails, at))
    if not data.shown:
        return [_goodput(data)]
    return [
        _goodput(data),
        _cdf(data, "Time to first token", "ttft_cdf", "time to first token, seconds", 1.0),
        _cdf(data, "Time per output token", "tpot_cdf", "mean time per token after the first, milliseconds", 1e3),
        _queue_waits(data),
        _loads(data),
        _hits(data),
        _shares(data),
    ]


def _goodput_spread(point: LoadPoint) -> float:
    figures = [row.goodput for row in point.rows if row.goodput is not None and row.policy not in REFERENCES]
    return max(figures) - min(figures) if figures else 0.0


def _shown(result: SimulationResult, trails: Mapping[Point, Trail], at: LoadPoint) -> list[tuple[RunResult, Trail]]:
    """Returns the runs at one load with the most frequent seed, in the order of the point's rows."""
    here = [run for run in result.runs if (run.rate_scale, run.prefill_scale) == at[:2] and run.point in trails]
    seeds = sorted(run.seed for run in here)
    seed = max(seeds, key=seeds.count, default=None)
    order = [row.policy for row in at.rows]
    of_seed = sorted((run for run in here if run.seed == seed), key=lambda run: order.index(run.policy))
    return [(run, trails[run.point]) for run in of_seed]


def _looks(policies: list[str], own: Collection[str]) -> dict[str, dict[str, Any]]:
    """Returns a line style for each policy: own policies solid and thick, references dotted, others in turn."""
    looks: dict[str, dict[str, Any]] = {}
    ranked = sorted((policy for policy in policies if policy not in REFERENCES), key=lambda policy: policy not in own)
    for i, policy in enumerate(policies):
        if policy in REFERENCES:
            color, dash, width, order = INK, (0, (1, 1)), 1.6, 2
        else:
            turn, hue = divmod(ranked.index(policy), len(SERIES))
            # The dashes shift by one after all hues are used; otherwise the same pairs would repeat.
            dash, width, order = (DASHES[1 + turn], 2.6, 4) if policy in own else (DASHES[(hue + 8 * turn) % 5], 1.3, 3)
            color = SERIES[hue]
        looks[policy] = {
            "color": color, "linestyle": dash, "linewidth": width, "zorder": order, "gid": f"series-{i}",
            "label": short(policy), "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "markeredgewidth": 0,
        }  # fmt: skip
    return looks


# --- the plots --------------------------------------------------------------------------------------------------------


def _goodput(data: _Data) -> Plot:
    """Draws goodput against load, or bars for a single load."""
    title, text = "Goodput", "Share of all offered requests that kept both objectives: "
    prefills = sorted({point.prefill_scale for point in data.points})
    if all(row.goodput is None for point in data.points for row in point.rows):
        return Plot(title, "Left out: no request was offered.")
    lines = len(data.points) > len(prefills)
    figure = new_figure(3.6 if lines else 0.7 + 0.24 * len(data.looks))
    row_of_axes = figure.subplots(1, len(prefills), sharey=True, squeeze=False)[0]
    for axes, prefill in zip(row_of_axes, prefills, strict=True):
        here = [point for point in data.points if point.prefill_scale == prefill]
        if lines:
            _goodput_lines(axes, data, here)
        else:
            _bars(axes, data, {row.policy: row.goodput for row in here[0].rows if row.goodput is not None})
            axes.set(xlim=(0, 1.12), xlabel="goodput")
        if len(prefills) > 1:
            axes.set_title(f"prefill_scale {prefill:g}")
    if not lines:
        return Plot(title, f"{text}longer is better.", figure)
    row_of_axes[0].set_ylabel("goodput")
    add_legend(figure, row_of_axes[0])
    spread = " Thin bars span the seeds." if any(row.seeds > 1 for point in data.points for row in point.rows) else ""
    return Plot(title, f"{text}higher is better, further right is busier.{spread}", figure)


def _goodput_lines(axes: Axes, data: _Data, points: list[LoadPoint]) -> None:
    for policy, look in data.looks.items():
        rows = [(p.rate_scale, row) for p in points for row in p.rows if row.policy == policy]
        known = [(rate, row.goodput, *row.goodput_range) for rate, row in rows if row.goodput_range is not None]
        rates, goods, lows, highs = zip(*known, strict=True) if known else [()] * 4
        axes.plot(rates, goods, **look)
        axes.vlines(rates, lows, highs, color=look["color"], linewidth=0.8, gid=look["gid"])
    if len(points) <= 8:
        axes.set_xticks([p.rate_scale for p in points], [f"{p.rate_scale:g}" for p in points])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("arrival rate, as a multiple of the trace's")


def _cdf(data: _Data, title: str, field: str, label: str, unit: float) -> Plot:
    """Draws the distribution of one time over all offered requests. `field` is the trail's curve, `unit` scales
    seconds.
    """
    curves = {run.policy: (pairs, run) for run, trail in data.shown if (pairs := getattr(trail, field))}
    if not curves:
        return Plot(title, "Left out: no request was completed.")
    figure = new_figure(3.6)
    axes = figure.subplots()
    for policy, (pairs, run) in curves.items():
        # The curve begins at share 0, so that a single answer is a step and not a dot.
        x = [pairs[0][0] * unit, *(value * unit for value, _ in pairs)]
        y = [0.0, *(share * run.completed / run.offered for _, share in pairs)]
        look = data.looks[policy] | {"marker": None}
        axes.plot(x, y, drawstyle="steps-post" if len(pairs) < 20 else "default", **look)
    log_ticks(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(ylim=(0, 1.02), xlabel=label, ylabel="share of offered requests")
    add_legend(figure, axes)
    text = (
        "A point says which share of all offered requests had at most this much: further left and higher is better, "
        "and a curve that ends below 100 % lost the rest."
    )
    return data.plot(title, text, figure, curves, "completed nothing")


def _queue_waits(data: _Data) -> Plot:
    """Draws the waits in the proxy per band over the time of arrival, in a panel for each policy."""
    title = "Wait in the proxy's queue by band"
    lines = {run.policy: trail.queue_wait for run, trail in data.shown}
    waiting = {
        policy: rows
        for policy, rows in lines.items()
        if any(p.max_s > WAIT_MIN_S for row in rows.values() for p in row)
    }
    if not waiting:
        return Plot(title, "Left out: no request waited in a proxy for longer than a millisecond.")
    if all(len(points) < 2 for rows in waiting.values() for points in rows.values()):
        return Plot(title, "Left out: too few requests waited in a proxy for a line over time.")
    bands = sorted({band for rows in waiting.values() for band in rows}, key=_level, reverse=True)
    figure, grid = _panels(list(waiting), 1.55)
    for rows, axes in zip(waiting.values(), grid, strict=True):
        for band, color in zip(bands, SERIES, strict=False):
            points = rows.get(band, [])
            x = [point.at_s / 60 for point in points]
            # The marker makes a band with a single point visible.
            axes.plot(x, [p.mean_s for p in points], ".-", color=color, markersize=2.5, linewidth=1.3, label=band)
            axes.plot(x, [p.max_s for p in points], color=color, linewidth=0.5, linestyle=(0, (2, 1)))
    # The panels share their axes.
    grid[0].set_yscale("symlog", linthresh=0.1)
    grid[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    grid[0].yaxis.set_minor_locator(NullLocator())
    grid[0].set_ylim(0, max(0.1, 1.3 * max(p.max_s for rows in waiting.values() for row in rows.values() for p in row)))
    grid[0].set_xlim(left=0)
    figure.supxlabel("minutes of arrival")
    figure.supylabel("seconds")
    add_legend(figure, grid[0])
    text = (
        "Solid: mean of the requests that arrived in that interval; thin dashes: the longest wait. "
        "Lower is better, and a higher band should be below a lower one."
    )
    if len(bands) > len(SERIES):
        text += f" The {len(SERIES)} highest of {len(bands)} bands."
    return data.plot(title, text, figure, waiting, "had no request waiting in the proxy")


def _loads(data: _Data) -> Plot:
    """Draws the load of every backend over time, in a heat map for each policy."""
    title = "Load of each backend"
    busy = {run.policy: trail for run, trail in data.shown if any(map(any, trail.load.values()))}
    if not busy:
        return Plot(title, "Left out: no backend was seen with a request.")
    rows = max(len(trail.load) for trail in busy.values())
    peak = max(max(map(max, trail.load.values())) for trail in busy.values())
    figure, grid = _panels(list(busy), min(2.4, 1.15 + 0.016 * rows))
    for trail, axes in zip(busy.values(), grid, strict=True):
        names, end_min = list(trail.load), max(trail.load_at_s[-1] / 60, 1e-6)
        image = axes.imshow(
            list(trail.load.values()), aspect="auto", interpolation="none", cmap="cividis",
            norm=PowerNorm(0.5, 0, peak), extent=(0, end_min, len(names) - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(visible=False)
        ends = sorted({0, len(names) - 1})
        axes.set_yticks(ends, [names[i] if len(names[i]) <= 8 else f"…{names[i][-7:]}" for i in ends])
    figure.supxlabel("minutes")
    bar = figure.colorbar(image, ax=grid, aspect=30, pad=0.015, label="running + waiting in the engine")
    bar.outline.set_visible(False)
    text = (
        "Each row is a backend: brighter is busier. An even picture is a balanced fleet; a bright row beside dark "
        "rows is a hot spot."
    )
    return data.plot(title, text, figure, busy, "used no backend")


def _hits(data: _Data) -> Plot:
    """Draws prefix cache hits per policy, and over time."""
    title = "Prefix-cache hit ratio"
    ratios = {row.policy: row.hit for row in data.at.rows if row.hit is not None}
    if not any(ratios.values()):
        return Plot(title, "Left out: nothing was found in any prefix cache.")
    found = data.at.bounds.get(HIT_BOUND)
    bounds = [found.value] if found is not None and found.value is not None else []
    figure = new_figure(max(2.4, 0.9 + 0.24 * len(ratios)))
    timed = any(len(trail.hits) > 1 for _, trail in data.shown)
    left, *over_time = figure.subplots(1, 1 + timed, squeeze=False, width_ratios=[1, 1.2][: 1 + timed])[0]
    _bars(left, data, ratios, rows_min=6)
    left.set(xlim=(0, min(1.12, 1.2 * max(*ratios.values(), *bounds, 0.01))))
    left.set_xlabel("share of prompt tokens found cached")
    for axes in over_time:
        for run, trail in data.shown:
            x, y = [at / 60 for at, _ in trail.hits], [ratio for _, ratio in trail.hits]
            axes.plot(x, y, **data.looks[run.policy] | {"marker": None})
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel="minutes of arrival", title="of all prompts until then")
    for bound in bounds:
        left.axvline(bound, **BOUND_STYLE)
        for axes in over_time:
            axes.axhline(bound, **BOUND_STYLE)
            axes.annotate(HIT_BOUND, (0.01, bound), (0, 3), ("axes fraction", "data"), fontsize=7.5, **LABEL)
    for axes in over_time:
        axes.set_ylim(0, min(1.02, axes.get_ylim()[1]))
    bound_text = " The dashed line is the hit ratio of a cache shared by all replicas." if bounds else ""
    text = f"Longer and higher is better: tokens found need not be computed.{bound_text}"
    return data.plot(title, text, figure, data.looks)


def _shares(data: _Data) -> Plot:
    """Draws the share of tokens of each tenant."""
    title = "Share per tenant"
    asked = {name: group.asked_share or 0.0 for name, group in data.shown[0][0].by_tenant.items()}
    if len(asked) < 2:
        return Plot(title, "Left out: there was only one tenant.")
    served = {run.policy: {name: group.token_share or 0.0 for name, group in run.by_tenant.items()}
              for run, _ in data.shown if run.completed}  # fmt: skip
    if not served:
        return Plot(title, "Left out: no request was completed.")
    ranked = sorted((name for name in asked if name != OTHER), key=lambda name: (-asked[name], name))
    bars = {"asked for": asked, **served}
    figure = new_figure(0.9 + 0.26 * len(bars))
    axes = figure.subplots()
    starts = [0.0] * len(bars)
    look: Any = {"height": 0.72, "edgecolor": PAGE, "linewidth": 0.6}
    for name, color in zip(ranked[: len(SERIES) - 1], SERIES, strict=False):
        widths = [bar.get(name, 0.0) for bar in bars.values()]
        axes.barh(range(len(bars)), widths, left=starts, color=color, label=short(name), **look)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    rest = [max(0.0, sum(bar.values()) - start) for bar, start in zip(bars.values(), starts, strict=True)]
    if max(rest) > 1e-9:
        axes.barh(range(len(bars)), rest, left=starts, color=GRID, label="all others", **look)
    axes.set_yticks(range(len(bars)), [short(name) for name in bars], color=INK)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.axhline(0.5, color=MUTED, linewidth=0.7)
    axes.set(xlim=(0, 1), xlabel="share of the prompt and output tokens of completed requests")
    add_legend(figure, axes)
    text = (
        "Each bar has the completed tokens by tenant; the first bar has the offered tokens. "
        "A tenant with a smaller part than in the first bar was served less than the others."
    )
    return data.plot(title, text, figure, served, "completed nothing")


# --- parts ------------------------------------------------------------------------------------------------------------


def _panels(names: list[str], height_in: float) -> tuple[Figure, list[Axes]]:
    rows = math.ceil(len(names) / PANELS_ACROSS)
    columns = math.ceil(len(names) / rows)
    figure = new_figure(0.5 + height_in * rows + (0.6 if rows == 1 else 0.0))
    grid = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for unused in grid[len(names) :]:
        unused.remove()
    for i, (axes, name) in enumerate(zip(grid, names, strict=False)):
        axes.set_title(short(name), fontsize=8.5 if len(name) <= 24 else 7)
        axes.xaxis.set_tick_params(labelbottom=i >= len(names) - columns)
    return figure, grid[: len(names)]


def _bars(axes: Axes, data: _Data, values: Mapping[str, float], rows_min: int = 1) -> None:
    """Draws a horizontal bar with its value for each policy, with room for at least `rows_min` bars."""
    for row, (policy, value) in enumerate(values.items()):
        axes.barh(row, value, height=0.68, color=data.looks[policy]["color"], gid=data.looks[policy]["gid"])
        axes.annotate(f"{value:.1%}", (value, row), (4, 0), va="center", fontsize=8, **LABEL)
    axes.set_yticks(range(len(values)), [short(policy) for policy in values], color=INK)
    axes.set_ylim(max(len(values), rows_min) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _level(band: str) -> float:
    return BAND_NAMES.get(band, float(band) if band.lstrip("-").isdigit() else -math.inf)
