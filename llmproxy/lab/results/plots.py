"""The plots of a report, drawn with matplotlib.

This module needs the optional dependency matplotlib; only the report imports it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from llmproxy.core.domain import BAND_NAMES
from llmproxy.lab.results.drawing import (
    BOUND_STYLE,
    DASHES,
    GRID,
    INK,
    LABEL_BOX,
    MARKERS,
    MUTED,
    PAGE,
    SERIES,
    add_legend,
    log_ticks,
    new_figure,
    panels,
    short,
)  # fmt: skip
from llmproxy.lab.results.result import LoadPoint, RunKey, RunResult, SimulationResult, Trail, load_points, policies_of
from llmproxy.lab.results.sums import OTHER

WAIT_MIN_S = 0.001
"""A request that is granted at once waits no longer than this."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure and the sentence that says how to read it, or why there is nothing to see where `figure` is None."""

    title: str
    caption: str
    figure: Figure | None


@dataclass(frozen=True, slots=True)
class _Data:
    """What every plot draws from. `looks` are the keyword arguments of each policy's line, its `gid` is what the page
    finds it by. `at` is the load of the plots that show only one, `shown` its runs of one seed that have a trail.
    """

    points: list[LoadPoint]
    looks: dict[str, dict[str, Any]]
    at: LoadPoint
    shown: list[tuple[RunResult, Trail]]
    hit_bounds: Mapping[str, float]

    def caption(self, text: str, drawn: Collection[str], missing: str) -> str:
        """`text`, the run that is shown, and the policies that are not `drawn` with the reason why."""
        absent = [run.policy for run, _ in self.shown if run.policy not in drawn]
        reason = f" Not shown, because they {missing}: {', '.join(absent)}." if absent else ""
        return f"{text} At {self.at.label}, seed {self.shown[0][0].seed}.{reason}"


def draw_all(
    result: SimulationResult,
    trails: Mapping[RunKey, Trail],
    own: Collection[str],
    references: Collection[str],
    hit_bounds: Collection[str],
) -> list[Plot]:
    """Every plot of a report, in its order; none for a result without runs. Call it within `style`."""
    if not result.runs:
        return []
    points = load_points(result, references)
    at = max(points, key=lambda point: _goodput_spread(point, references))
    looks = _looks(policies_of(result, references), own, references)
    bounds = {name: b.value for name, b in at.bounds.items() if name in hit_bounds and b.value is not None}
    data = _Data(points, looks, at, _shown(result, trails, at), bounds)
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


def _goodput_spread(point: LoadPoint, references: Collection[str]) -> float:
    figures = [row.goodput for row in point.rows if row.goodput is not None and row.policy not in references]
    return max(figures) - min(figures) if figures else 0.0


def _shown(result: SimulationResult, trails: Mapping[RunKey, Trail], at: LoadPoint) -> list[tuple[RunResult, Trail]]:
    """The runs at one load with the seed that most of them have, in the order of the point's rows."""
    here = [run for run in result.runs if (run.rate_scale, run.prefill_scale) == at[:2] and run.key in trails]
    seeds = sorted(run.seed for run in here)
    seed = max(sorted(set(seeds)), key=seeds.count, default=None)
    order = [row.policy for row in at.rows]
    of_seed = sorted((run for run in here if run.seed == seed), key=lambda run: order.index(run.policy))
    return [(run, trails[run.key]) for run in of_seed]


def _looks(policies: Sequence[str], own: Collection[str], references: Collection[str]) -> dict[str, dict[str, Any]]:
    """A look for each policy: own ones solid and thick, references dotted, all others in hues and dashes in turn."""
    looks: dict[str, dict[str, Any]] = {}
    ours = [policy for policy in policies if policy in own]
    others = [policy for policy in policies if policy not in own and policy not in references]
    spare = SERIES[len(ours) :] if len(ours) <= len(SERIES) // 2 else SERIES
    for i, policy in enumerate(policies):
        if policy in ours:
            rank = ours.index(policy)
            color, dash, width, order = SERIES[rank % len(SERIES)], DASHES[1 + rank // len(SERIES)], 2.6, 4
        elif policy in others:
            # Shifted by one in every round through the hues, or else the same pairs would come again.
            rank = others.index(policy)
            color, dash, width, order = spare[rank % len(spare)], DASHES[(rank + rank // len(spare)) % 5], 1.3, 3
        else:
            color, dash, width, order = INK, (0, (1, 1)), 1.6, 2
        looks[policy] = {
            "color": color, "linestyle": dash, "linewidth": width, "zorder": order, "gid": f"series-{i}",
            "label": short(policy), "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "markeredgewidth": 0,
        }  # fmt: skip
    return looks


# --- the plots --------------------------------------------------------------------------------------------------------


def _goodput(data: _Data) -> Plot:
    """Goodput against load, or bars where there is only one load for each cost of a prompt token."""
    title, text = "Goodput", "Share of all offered requests that kept both objectives: "
    prefills = sorted({point.prefill_scale for point in data.points})
    if all(row.goodput is None for point in data.points for row in point.rows):
        return Plot(title, "Left out: no request was offered.", None)
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
    seeds = max(row.seeds for point in data.points for row in point.rows)
    spread = " Thin bars span the seeds." if seeds > 1 else ""
    return Plot(title, f"{text}higher is better, further right is busier.{spread}", figure)


def _goodput_lines(axes: Axes, data: _Data, points: list[LoadPoint]) -> None:
    for policy, look in data.looks.items():
        rows = [(p.rate_scale, row) for p in points for row in p.rows if row.policy == policy]
        known = [(rate, row.goodput, row.goodput_range) for rate, row in rows if row.goodput is not None]
        axes.plot([rate for rate, _, _ in known], [good for _, good, _ in known], **look)
        for rate, _, span in known:
            if span is not None and span[0] < span[1]:
                axes.vlines(rate, *span, color=look["color"], linewidth=0.8, gid=look["gid"])
    rates = [point.rate_scale for point in points]
    if len(rates) <= 8:
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("arrival rate, as a multiple of the trace's")


def _cdf(data: _Data, title: str, field: str, label: str, unit: float) -> Plot:
    """The distribution of one time over all offered requests. `field` is the trail's curve, `unit` scales seconds."""
    trails = [(run, getattr(trail, field)) for run, trail in data.shown]
    curves = {run.policy: (pairs, run.completed / run.offered) for run, pairs in trails if pairs}
    if not curves:
        return Plot(title, "Left out: no request was completed.", None)
    figure = new_figure(3.6)
    axes = figure.subplots()
    for policy, (pairs, completed) in curves.items():
        # The curve begins where it leaves the ground, so that a single answer is a step and not a dot.
        x = [pairs[0][0] * unit, *(value * unit for value, _ in pairs)]
        y = [0.0, *(share * completed for _, share in pairs)]
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
    return Plot(title, data.caption(text, curves, "completed nothing"), figure)


def _queue_waits(data: _Data) -> Plot:
    """Waiting in the proxy, by band, over the time of arrival; one panel for each policy."""
    title = "Wait in the proxy's queue by band"
    waiting = {
        run.policy: trail.queue_wait
        for run, trail in data.shown
        if any(point.max_s > WAIT_MIN_S for points in trail.queue_wait.values() for point in points)
    }
    if not waiting:
        return Plot(title, "Left out: no request waited in a proxy for longer than a millisecond.", None)
    if all(len(points) < 2 for bands in waiting.values() for points in bands.values()):
        return Plot(title, "Left out: too few requests waited in a proxy for a line over time.", None)
    everything = [point for bands in waiting.values() for points in bands.values() for point in points]
    bands = sorted({band for rows in waiting.values() for band in rows}, key=_level, reverse=True)
    figure, grid = panels(list(waiting), 1.55)
    for rows, axes in zip(waiting.values(), grid, strict=True):
        for band, color in zip(bands, SERIES, strict=False):
            x = [point.at_s / 60 for point in rows.get(band, [])]
            means, longest = [p.mean_s for p in rows.get(band, [])], [p.max_s for p in rows.get(band, [])]
            # A marker, so that a band with one point is seen too.
            axes.plot(x, means, ".-", color=color, markersize=2.5, linewidth=1.3, label=band)
            axes.plot(x, longest, color=color, linewidth=0.5, linestyle=(0, (2, 1)))
        axes.set_yscale("symlog", linthresh=0.1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, max(0.1, 1.3 * max(point.max_s for point in everything)))
        axes.set_xlim(0, 1.02 * max(1e-3, *(point.at_s / 60 for point in everything)))
    figure.supxlabel("minutes of arrival", fontsize=8.5)
    figure.supylabel("seconds", fontsize=8.5)
    add_legend(figure, grid[0])
    text = (
        "Solid: mean of the requests that arrived in that stretch of time; thin dashes: the longest wait. "
        "Lower is better, and a higher band should lie below a lower one."
    )
    if len(bands) > len(SERIES):
        text += f" The {len(SERIES)} highest of {len(bands)} bands."
    return Plot(title, data.caption(text, waiting, "never let a request wait in the proxy"), figure)


def _loads(data: _Data) -> Plot:
    """Load of every backend over time, one heat map for each policy."""
    title = "Load of each backend"
    busy = {run.policy: trail for run, trail in data.shown if any(map(any, trail.load.values()))}
    if not busy:
        return Plot(title, "Left out: no backend was seen with a request.", None)
    rows = max(len(trail.load) for trail in busy.values())
    peak = max(max(map(max, trail.load.values())) for trail in busy.values())
    figure, grid = panels(list(busy), min(2.4, 1.15 + 0.016 * rows))
    for trail, axes in zip(busy.values(), grid, strict=True):
        names, end_min = list(trail.load), max(trail.load_at_s[-1] / 60, 1e-6)
        image = axes.imshow(
            list(trail.load.values()), aspect="auto", interpolation="none", cmap="cividis",
            norm=PowerNorm(0.5, 0, max(peak, 1)), extent=(0, end_min, len(names) - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(visible=False)
        ends = sorted({0, len(names) - 1})
        axes.set_yticks(ends, [names[i] if len(names[i]) <= 8 else f"…{names[i][-7:]}" for i in ends])
    figure.supxlabel("minutes", fontsize=8.5)
    bar = figure.colorbar(image, ax=grid, aspect=30, pad=0.015, label="running + waiting in the engine")
    bar.outline.set_visible(False)
    text = (
        "One row for each backend: brighter is busier. An even picture is a balanced fleet; a bright row beside dark "
        "ones is a hot spot."
    )
    return Plot(title, data.caption(text, busy, "used no backend"), figure)


def _hits(data: _Data) -> Plot:
    """Prefix-cache hits: by policy, and how they came about over time."""
    title = "Prefix-cache hit ratio"
    ratios = {row.policy: row.hit for row in data.at.rows if row.hit is not None}
    if not any(ratios.values()):
        return Plot(title, "Left out: nothing was found in any prefix cache.", None)
    figure = new_figure(max(2.4, 0.9 + 0.24 * len(ratios)))
    timed = any(len(trail.hits) > 1 for _, trail in data.shown)
    left, *over_time = figure.subplots(1, 1 + timed, squeeze=False, width_ratios=[1, 1.2][: 1 + timed])[0]
    _bars(left, data, ratios, rows_min=6)
    top = max(*ratios.values(), *data.hit_bounds.values(), 0.01) * 1.2
    left.set(xlim=(0, min(1.12, top)), xlabel="share of prompt tokens found cached")
    for value in data.hit_bounds.values():
        left.axvline(value, **BOUND_STYLE)
    for axes in over_time:
        for run, trail in data.shown:
            look = data.looks[run.policy] | {"marker": None}
            axes.plot([at / 60 for at, _ in trail.hits], [ratio for _, ratio in trail.hits], **look)
            top = max([top, *(ratio for _, ratio in trail.hits)])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(ylim=(0, min(1.02, 1.05 * top)), xlabel="minutes of arrival", title="of all prompts until then")
        for name, value in data.hit_bounds.items():
            axes.axhline(value, **BOUND_STYLE)
            at = ("axes fraction", "data")
            axes.annotate(name, (0.01, value), (0, 3), at, "offset points", fontsize=7.5, bbox=LABEL_BOX, zorder=6)
    bound = " The dashed line is what a cache shared by all replicas would find." if data.hit_bounds else ""
    text = f"Longer and higher is better: tokens found need not be computed.{bound}"
    return Plot(title, data.caption(text, data.looks, ""), figure)


def _shares(data: _Data) -> Plot:
    """Which share of the tokens each tenant got."""
    title = "Share per tenant"
    asked = {name: group.asked_share or 0.0 for name, group in data.shown[0][0].by_tenant.items()}
    if len(asked) < 2:
        return Plot(title, "Left out: there was only one tenant.", None)
    served = {run.policy: {name: group.token_share or 0.0 for name, group in run.by_tenant.items()}
              for run, _ in data.shown if run.completed}  # fmt: skip
    if not served:
        return Plot(title, "Left out: no request was completed.", None)
    ranked = sorted((name for name in asked if name != OTHER), key=lambda name: (-asked[name], name))
    drawn = ranked[: len(SERIES) - 1]
    bars = {"asked for": asked, **served}
    segments = {short(name): [bar.get(name, 0.0) for bar in bars.values()] for name in drawn}
    rest = [max(0.0, sum(bar.values()) - sum(bar.get(name, 0.0) for name in drawn)) for bar in bars.values()]
    figure = new_figure(0.9 + 0.26 * len(bars))
    axes = figure.subplots()
    starts = [0.0] * len(bars)
    colors = [*SERIES[: len(drawn)], GRID]
    for (label, widths), color in zip([*segments.items(), ("all others", rest)], colors, strict=True):
        if any(width > 1e-9 for width in widths) or color != GRID:
            look: Any = {"height": 0.72, "color": color, "label": label, "edgecolor": PAGE, "linewidth": 0.6}
            axes.barh(range(len(bars)), widths, left=starts, **look)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [short(name) for name in bars], color=INK)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.axhline(0.5, color=MUTED, linewidth=0.7)
    axes.set(xlim=(0, 1), xlabel="share of the prompt and output tokens of completed requests")
    add_legend(figure, axes)
    text = (
        "Each bar is everything that was completed, by tenant; the first one is what was asked for. "
        "A tenant whose part shrinks was served less than the others."
    )
    return Plot(title, data.caption(text, served, "completed nothing"), figure)


# --- parts ------------------------------------------------------------------------------------------------------------


def _bars(axes: Axes, data: _Data, values: Mapping[str, float], rows_min: int = 1) -> None:
    """One horizontal bar for each policy, its value written at its end; room for at least `rows_min` of them."""
    for row, (policy, value) in enumerate(values.items()):
        axes.barh(row, value, height=0.68, color=data.looks[policy]["color"], gid=data.looks[policy]["gid"])
        place: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{value:.1%}", (value, row), fontsize=8, bbox=LABEL_BOX, **place)
    axes.set_yticks(range(len(values)), [short(policy) for policy in values], color=INK)
    axes.set_ylim(max(len(values), rows_min) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _level(band: str) -> float:
    return BAND_NAMES.get(band, float(band) if band.lstrip("-").isdigit() else -math.inf)
