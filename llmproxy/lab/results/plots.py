"""The plots of a report, drawn with matplotlib as SVG text whose colours follow the page's light or dark scheme.

This module needs the optional dependency matplotlib and is imported by the report alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from llmproxy.core.domain import BAND_NAMES
from llmproxy.lab.results.drawing import (
    GRID,
    INK,
    MUTED,
    PAGE,
    SERIES,
    PolicyStyle,
    add_legend,
    add_title,
    lines_of,
    minor_label,
    new_figure,
    panels,
    percent_ticks,
    short,
)
from llmproxy.lab.results.result import LoadPoint, RunKey, RunResult, SimulationResult, Trail, load_points, policies_of
from llmproxy.lab.results.sums import OTHER

TENANTS_DRAWN = len(SERIES) - 1
WAIT_MIN_S = 0.001
"""Being let through at once takes no longer."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure and the sentence that says how to read it, or why there is nothing to see where `figure` is None."""

    title: str
    caption: str
    figure: Figure | None


@dataclass(frozen=True, slots=True)
class _Scene:
    """What every plot draws from. `at` is the load of the plots that show only one, `shown` its runs with a trail."""

    points: list[LoadPoint]
    lines: dict[str, PolicyStyle]
    at: LoadPoint
    shown: list[tuple[RunResult, Trail]]
    hit_bounds: Collection[str]

    @property
    def of_one_run(self) -> str:
        return f"At {self.at.label}, seed {self.shown[0][0].seed}."


def draw_all(
    result: SimulationResult,
    trails: Mapping[RunKey, Trail],
    own: Collection[str],
    references: Collection[str],
    hit_bounds: Collection[str],
) -> list[Plot]:
    """Every plot of a report, in its order; none for a result without runs. To be called within `drawing.style`."""
    if not result.runs:
        return []
    points = load_points(result, references)
    lines = lines_of(policies_of(result, references), own, references)
    at = _telling(points, references)
    scene = _Scene(points, lines, at, _shown(result, trails, at), hit_bounds)
    if not scene.shown:
        return [goodput(scene)]
    return [draw(scene) for draw in (goodput, ttft, tpot, queue_waits, loads, hits, shares)]


def _telling(points: list[LoadPoint], references: Collection[str]) -> LoadPoint:
    """The load at which the policies' goodput differs most; the lighter one of equals."""

    def spread(point: LoadPoint) -> float:
        figures = [row.goodput for row in point.rows if row.goodput is not None and row.policy not in references]
        return max(figures) - min(figures) if figures else 0.0

    return max(points, key=spread)


def _shown(result: SimulationResult, trails: Mapping[RunKey, Trail], at: LoadPoint) -> list[tuple[RunResult, Trail]]:
    """The runs at one load with the seed that most of them have, in the order of the point's rows."""
    here = [run for run in result.runs if (run.rate_scale, run.prefill_scale) == at[:2] and run.key in trails]
    seeds = sorted(run.seed for run in here)
    if not seeds:
        return []
    seed = max(sorted(set(seeds)), key=seeds.count)
    order = [row.policy for row in at.rows]
    of_seed = sorted((run for run in here if run.seed == seed), key=lambda run: order.index(run.policy))
    return [(run, trails[run.key]) for run in of_seed]


# --- the plots --------------------------------------------------------------------------------------------------------


def goodput(scene: _Scene) -> Plot:
    """Goodput against load, or bars where there is only one load for each cost of a prompt token."""
    title = "Goodput"
    prefills = sorted({point.prefill_scale for point in scene.points})
    if all(row.goodput is None for point in scene.points for row in point.rows):
        return Plot(title, "Left out: no request was offered.", None)
    # A line needs two loads at one cost of a prompt token.
    if len(scene.points) == len(prefills):
        return _goodput_bars(scene, title)
    figure = new_figure(3.6)
    axes_row = figure.subplots(1, len(prefills), sharey=True, squeeze=False)[0]
    for axes, prefill in zip(axes_row, prefills, strict=True):
        here = [point for point in scene.points if point.prefill_scale == prefill]
        for line in scene.lines.values():
            rows = [(p.rate_scale, row) for p in here for row in p.rows if row.policy == line.policy]
            known = [(rate, row.goodput, row.goodput_range) for rate, row in rows if row.goodput is not None]
            line.plot(axes, [rate for rate, _, _ in known], [good for _, good, _ in known], marked=True)
            for rate, _, span in known:
                if span is not None and span[0] < span[1]:
                    axes.vlines(rate, *span, color=line.color, linewidth=0.8, gid=line.gid)
        rates = [point.rate_scale for point in here]
        if len(rates) <= 8:
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        percent_ticks(axes.yaxis)
        axes.set_xlabel("arrival rate, as a multiple of the trace's")
        if len(prefills) > 1:
            axes.set_title(f"prefill_scale {prefill:g}", loc="left")
    axes_row[0].set_ylabel("goodput")
    add_legend(figure, axes_row[0])
    seeds = max(row.seeds for point in scene.points for row in point.rows)
    spread = " Thin bars span the seeds." if seeds > 1 else ""
    caption = (
        f"Share of all offered requests that kept both objectives: higher is better, further right is busier.{spread}"
    )
    return Plot(title, caption, figure)


def _goodput_bars(scene: _Scene, title: str) -> Plot:
    figure = new_figure(0.7 + 0.24 * len(scene.lines))
    axes_row = figure.subplots(1, len(scene.points), sharey=True, squeeze=False)[0]
    for axes, point in zip(axes_row, scene.points, strict=True):
        rows = [row for row in point.rows if row.goodput is not None]
        _bars(axes, scene, {row.policy: row.goodput or 0.0 for row in rows})
        axes.set_xlim(0, 1.12)
        axes.set_xlabel("goodput")
        if len(scene.points) > 1:
            axes.set_title(f"prefill_scale {point.prefill_scale:g}", loc="left")
    return Plot(title, "Share of all offered requests that kept both objectives: longer is better.", figure)


def ttft(scene: _Scene) -> Plot:
    """How long until the first token."""
    title = "Time to first token"
    curves = {run.policy: (trail.ttft_cdf, _share(run)) for run, trail in scene.shown}
    return _cdf(scene, title, curves, "time to first token, seconds", 1.0)


def tpot(scene: _Scene) -> Plot:
    """How long from token to token."""
    title = "Time per output token"
    curves = {run.policy: (trail.tpot_cdf, _share(run)) for run, trail in scene.shown}
    return _cdf(scene, title, curves, "mean time per output token after the first, milliseconds", 1000.0)


def _share(run: RunResult) -> float:
    return run.completed / run.offered if run.offered else 0.0


def _cdf(
    scene: _Scene, title: str, curves: dict[str, tuple[list[tuple[float, float]], float]], label: str, unit: float
) -> Plot:
    drawn = {policy: curve for policy, curve in curves.items() if curve[0]}
    if not drawn:
        return Plot(title, "Left out: no request was completed.", None)
    figure = new_figure(3.6)
    axes = figure.subplots()
    for policy, (pairs, top) in drawn.items():
        # The curve begins where it leaves the ground, so that a single answer is a step and not a dot.
        x = [pairs[0][0] * unit, *(value * unit for value, _ in pairs)]
        y = [0.0, *(share * top for _, share in pairs)]
        scene.lines[policy].plot(axes, x, y, step=len(pairs) < 20)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(minor_label(axes)))
    percent_ticks(axes.yaxis)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(label)
    axes.set_ylabel("share of offered requests")
    add_legend(figure, axes)
    caption = (
        "A point says which share of all offered requests had at most this much: further left and higher is better, "
        f"and a curve that ends below 100 % lost the rest. {scene.of_one_run}"
    )
    return Plot(title, caption + _absent(curves, drawn, "completed nothing"), figure)


def queue_waits(scene: _Scene) -> Plot:
    """Waiting in the proxy, by band, over the time of arrival."""
    title = "Wait in the proxy's queue by band"
    waiting = {
        run.policy: trail.queue_wait
        for run, trail in scene.shown
        if any(point.max_s > WAIT_MIN_S for points in trail.queue_wait.values() for point in points)
    }
    everyone = [run.policy for run, _ in scene.shown]
    if not waiting:
        return Plot(title, "Left out: no request waited in a proxy for longer than a millisecond.", None)
    if all(len(points) < 2 for rows in waiting.values() for points in rows.values()):
        return Plot(title, "Left out: too few requests waited in a proxy for a line over time.", None)
    bands = sorted({band for rows in waiting.values() for band in rows}, key=_level, reverse=True)
    longest_s = max(point.max_s for rows in waiting.values() for points in rows.values() for point in points)
    latest_min = max(
        1e-3, *(point.at_s / 60 for rows in waiting.values() for points in rows.values() for point in points)
    )
    figure, grid = panels(list(waiting), 1.55)
    for (policy, rows), axes in zip(waiting.items(), grid, strict=True):
        for band, color in zip(bands, SERIES, strict=False):
            points = rows.get(band, [])
            x = [point.at_s / 60 for point in points]
            # A marker, so that a band with one point is seen too.
            axes.plot(
                x, [point.mean_s for point in points], ".-", color=color, markersize=2.5, linewidth=1.3, label=band
            )
            axes.plot(x, [point.max_s for point in points], color=color, linewidth=0.5, linestyle=(0, (2, 1)))
        add_title(axes, policy)
        axes.set_yscale("symlog", linthresh=0.1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, max(0.1, 1.3 * longest_s))
        axes.set_xlim(0, 1.02 * latest_min)
    figure.supxlabel("minutes of arrival", fontsize=8.5)
    figure.supylabel("seconds", fontsize=8.5)
    add_legend(figure, grid[0], most=max(grid, key=lambda axes: len(axes.lines)))
    caption = (
        "Solid: mean of the requests that arrived in that stretch of time; thin dashes: the longest wait. "
        f"Lower is better, and a higher band should lie below a lower one. {scene.of_one_run}"
    )
    if len(bands) > len(SERIES):
        caption += f" The {len(SERIES)} highest of {len(bands)} bands."
    return Plot(title, caption + _absent(everyone, waiting, "never let a request wait in the proxy"), figure)


def loads(scene: _Scene) -> Plot:
    """Load of every backend over time, one heat map for each policy."""
    title = "Load of each backend"
    busy = {run.policy: trail for run, trail in scene.shown if any(map(any, trail.load.values()))}
    if not busy:
        return Plot(title, "Left out: no backend was seen with a request.", None)
    rows = max(len(trail.load) for trail in busy.values())
    figure, grid = panels(list(busy), min(2.4, 1.15 + 0.016 * rows))
    peak = max(max(map(max, trail.load.values())) for trail in busy.values())
    image = None
    for (policy, trail), axes in zip(busy.items(), grid, strict=True):
        names = list(trail.load)
        end_min = max(trail.load_at_s[-1] / 60, 1e-6)
        image = axes.imshow(
            list(trail.load.values()),
            aspect="auto",
            interpolation="none",
            cmap="cividis",
            norm=PowerNorm(0.5, 0, max(peak, 1)),
            extent=(0, end_min, len(names) - 0.5, -0.5),
        )
        axes.grid(visible=False)
        add_title(axes, policy)
        axes.set_yticks([0, len(names) - 1] if len(names) > 1 else [0])
        axes.set_yticklabels([_tail(names[0]), _tail(names[-1])] if len(names) > 1 else [_tail(names[0])])
    figure.supxlabel("minutes", fontsize=8.5)
    assert image is not None
    bar = figure.colorbar(image, ax=list(grid), aspect=30, pad=0.015, label="running + waiting in the engine")
    bar.outline.set_visible(False)
    caption = (
        "One row for each backend: brighter is busier. An even picture is a balanced fleet; a bright row beside dark "
        f"ones is a hot spot. {scene.of_one_run}"
    )
    return Plot(title, caption + _absent([run.policy for run, _ in scene.shown], busy, "used no backend"), figure)


def hits(scene: _Scene) -> Plot:
    """Prefix-cache hits: by policy, and how they came about over time."""
    title = "Prefix-cache hit ratio"
    ratios = {row.policy: row.hit for row in scene.at.rows if row.hit is not None}
    bounds = {name: b.value for name, b in scene.at.bounds.items() if name in scene.hit_bounds and b.value is not None}
    if not any(ratios.values()):
        return Plot(title, "Left out: nothing was found in any prefix cache.", None)
    figure = new_figure(max(2.4, 0.9 + 0.24 * len(ratios)))
    timed = any(len(trail.hits) > 1 for _, trail in scene.shown)
    left, *over_time = figure.subplots(1, 1 + timed, squeeze=False, width_ratios=[1, 1.2][: 1 + timed])[0]
    _bars(left, scene, ratios, rows_min=6)
    top = max(*ratios.values(), *bounds.values(), 0.01) * 1.2
    left.set_xlim(0, min(1.12, top))
    left.set_xlabel("share of prompt tokens found cached")
    for value in bounds.values():
        left.axvline(value, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    for axes in over_time:
        _hits_over_time(axes, scene, bounds, top)
    bound = " The dashed line is what a cache shared by all replicas would find." if bounds else ""
    caption = f"Longer and higher is better: tokens found need not be computed.{bound} {scene.of_one_run}"
    return Plot(title, caption, figure)


def _hits_over_time(axes: Axes, scene: _Scene, bounds: Mapping[str, float], top: float) -> None:
    for run, trail in scene.shown:
        scene.lines[run.policy].plot(axes, [at / 60 for at, _ in trail.hits], [ratio for _, ratio in trail.hits])
        top = max([top, *(ratio for _, ratio in trail.hits)])
    percent_ticks(axes.yaxis)
    axes.set_ylim(0, min(1.02, 1.05 * top))
    axes.set_xlabel("minutes of arrival")
    axes.set_title("of all prompts until then", loc="left")
    for name, value in bounds.items():
        axes.axhline(value, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        at, box = ("axes fraction", "data"), {"facecolor": PAGE, "edgecolor": "none", "pad": 0.5}
        axes.annotate(name, (0.01, value), (0, 3), at, "offset points", fontsize=7.5, bbox=box, zorder=6)


def shares(scene: _Scene) -> Plot:
    """Who got which share of the tokens."""
    title = "Share per tenant"
    first = scene.shown[0][0]
    asked = {name: group.asked_share or 0.0 for name, group in first.by_tenant.items()}
    if len(asked) < 2:
        return Plot(title, "Left out: there was only one tenant.", None)
    served = {
        r.policy: {n: g.token_share or 0.0 for n, g in r.by_tenant.items()} for r, _ in scene.shown if r.completed
    }
    if not served:
        return Plot(title, "Left out: no request was completed.", None)
    drawn = sorted((name for name in asked if name != OTHER), key=lambda name: (-asked[name], name))[:TENANTS_DRAWN]
    bars = {"asked for": asked, **served}
    figure = new_figure(0.9 + 0.26 * len(bars))
    axes = figure.subplots()
    starts = [0.0] * len(bars)
    segments = [
        (short(name), color, [bar.get(name, 0.0) for bar in bars.values()])
        for name, color in zip(drawn, SERIES, strict=False)
    ]
    rest = [max(0.0, sum(bar.values()) - sum(bar.get(name, 0.0) for name in drawn)) for bar in bars.values()]
    if any(share > 1e-9 for share in rest):
        segments.append(("all others", GRID, rest))
    for label, color, widths in segments:
        axes.barh(
            range(len(bars)), widths, left=starts, height=0.72, color=color, label=label, edgecolor=PAGE, linewidth=0.6
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [short(name) for name in bars], color=INK)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlim(0, 1)
    percent_ticks(axes.xaxis)
    axes.axhline(0.5, color=MUTED, linewidth=0.7)
    axes.set_xlabel("share of the prompt and output tokens of completed requests")
    add_legend(figure, axes)
    caption = (
        "Each bar is everything that was completed, by tenant; the first one is what was asked for. "
        f"A tenant whose part shrinks was served less than the others. {scene.of_one_run}"
    )
    return Plot(title, caption + _absent([r.policy for r, _ in scene.shown], served, "completed nothing"), figure)


# --- parts ------------------------------------------------------------------------------------------------------------


def _bars(axes: Axes, scene: _Scene, values: Mapping[str, float], rows_min: int = 1) -> None:
    """One horizontal bar for each policy, its value written at its end; room for at least `rows_min` of them."""
    for row, (policy, value) in enumerate(values.items()):
        line = scene.lines[policy]
        axes.barh(row, value, height=0.68, color=line.color, gid=line.gid)
        box = {"facecolor": PAGE, "edgecolor": "none", "pad": 0.8}
        axes.annotate(f"{value:.1%}", (value, row), (4, 0), "data", "offset points", va="center", fontsize=8, bbox=box)
    axes.set_yticks(range(len(values)), [short(policy) for policy in values], color=INK)
    axes.set_ylim(max(len(values), rows_min) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    percent_ticks(axes.xaxis)


def _absent(everyone: Collection[str], shown: Collection[str], why: str) -> str:
    missing = [policy for policy in everyone if policy not in shown]
    return f" Not shown, because they {why}: {', '.join(missing)}." if missing else ""


def _level(band: str) -> float:
    if band in BAND_NAMES:
        return BAND_NAMES[band]
    return float(band) if band.lstrip("-").isdigit() else -math.inf


def _tail(name: str) -> str:
    return name if len(name) <= 8 else "…" + name[-7:]
