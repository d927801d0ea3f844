"""The plots of a report, drawn with matplotlib: goodput over the load, fleets of several sizes, autoscaling.

This module needs the optional dependency matplotlib; only the report imports it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from llmproxy.lab.results.drawing import INK, SERIES, add_legend, new_figure, short
from llmproxy.lab.results.fleet_tables import Sizes
from llmproxy.lab.results.objectives import Wanted
from llmproxy.lab.results.result import REFERENCES, LoadPoint, SimulationResult, Trail, load_points, policies_of

DASHES: tuple[Any, ...] = ((0, (5, 1.6)), "-", (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1.2)))
SIGNALS: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)))  # Lines of autoscaling signals.
BOUND_STYLE: Any = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 2))}
MARKERS = "osD^vPX<>*h"


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure and its caption."""

    title: str
    caption: str
    figure: Figure


def goodput_plot(result: SimulationResult, own: Collection[str]) -> Plot | None:
    """Draws goodput against load, with thicker lines for `own`, the names of llmproxy's own policies.

    Returns None without several loads. Call it within `drawing.style`.
    """
    points = load_points(result)
    prefills = sorted({point.prefill_scale for point in points})
    known = any(row.goodput is not None for point in points for row in point.rows)
    if len(points) == len(prefills) or not known:
        return None
    looks = _looks(policies_of(result), own)
    figure = new_figure(3.6)
    row_of_axes = figure.subplots(1, len(prefills), sharey=True, squeeze=False)[0]
    for axes, prefill in zip(row_of_axes, prefills, strict=True):
        _goodput_lines(axes, looks, [point for point in points if point.prefill_scale == prefill])
        if len(prefills) > 1:
            axes.set_title(f"prefill_scale {prefill:g}")
    row_of_axes[0].set_ylabel("goodput")
    add_legend(figure, row_of_axes[0])
    spread = " Thin bars span the seeds." if any(row.seeds > 1 for point in points for row in point.rows) else ""
    text = "Share of all offered requests that kept both objectives: higher is better, further right is busier."
    return Plot("Goodput", f"{text}{spread}", figure)


def _looks(policies: list[str], own: Collection[str]) -> dict[str, dict[str, Any]]:
    """Returns a line style for each policy: thick lines for `own`, dotted ones for `REFERENCES`, and different colours
    and dashes for the others.
    """
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


def _goodput_lines(axes: Axes, looks: dict[str, dict[str, Any]], points: list[LoadPoint]) -> None:
    for policy, look in looks.items():
        rows = [(p.rate_scale, row) for p in points for row in p.rows if row.policy == policy]
        known = [(rate, row.goodput, *row.goodput_range) for rate, row in rows if row.goodput_range is not None]
        rates, goods, lows, highs = zip(*known, strict=True) if known else [()] * 4
        axes.plot(rates, goods, **look)
        axes.vlines(rates, lows, highs, color=look["color"], linewidth=0.8, gid=look["gid"])
    if len(points) <= 8:
        axes.set_xticks([p.rate_scale for p in points], [f"{p.rate_scale:g}" for p in points])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("arrival rate, as a multiple of the trace's")


# --- fleets -----------------------------------------------------------------------------------------------------------


def replicas_plot(trails: Sequence[tuple[str, Trail]]) -> Plot:
    """Draws replicas, queue and attainment over time, with a line for each trail."""
    figure = new_figure(6.4)
    replicas, queue, kept = figure.subplots(3, 1, sharex=True, height_ratios=[1.6, 1.0, 1.0])
    for i, (name, trail) in enumerate(trails):
        look = {"color": SERIES[i % len(SERIES)], "linestyle": SIGNALS[i // len(SERIES) % 3], "gid": f"series-{i}"}
        minutes = [at_s / 60 for at_s, _, _ in trail.scaled]
        serving = [count for _, _, count in trail.scaled]
        replicas.plot(minutes, serving, drawstyle="steps-post", linewidth=1.6, label=short(name), **look)
        wanted = [count for _, count, _ in trail.scaled]
        thin = look | {"linestyle": (0, (1, 1.5))}
        replicas.plot(minutes, wanted, drawstyle="steps-post", linewidth=0.9, **thin)
        queue.plot([at_s / 60 for at_s in trail.load_at_s], trail.queued, linewidth=1.3, **look)
        kept.plot([at_s / 60 for at_s, _ in trail.attained], [share for _, share in trail.attained], **look)
    replicas.set(ylabel="replicas")
    replicas.set_ylim(bottom=0)
    replicas.yaxis.set_major_locator(MaxNLocator(integer=True))
    queue.set(ylabel="requests in the queue")
    queue.set_ylim(bottom=0)
    kept.set(ylabel="kept objectives", ylim=(0, 1.04), xlabel="minutes")
    kept.yaxis.set_major_formatter(PercentFormatter(1.0))
    add_legend(figure, replicas)
    text = (
        "Serving replicas (solid) and wanted replicas (dots), requests waiting in the proxy, and the share of the "
        "requests of that interval that met their objectives. A good signal adds replicas before the queue grows, and "
        "removes them when the work is over."
    )
    return Plot("Replicas over time", text, figure)


def sizes_plot(found: Sequence[Sizes], wanted: Wanted) -> Plot:
    """Draws attainment and cost against the number of replicas."""
    figure = new_figure(3.6)
    kept, cost = figure.subplots(1, 2)
    look = 0
    for sizes in found:
        count = [row.replicas for row in sizes.rows]
        bands = sorted({band for row in sizes.rows for band in row.by_band}) if len(found) == 1 else []
        lines = {sizes.name: [row.kept for row in sizes.rows]}
        if len(bands) > 1:
            lines |= {band: [row.by_band.get(band, 0.0) for row in sizes.rows] for band in bands}
        for name, shares in lines.items():
            gid = f"series-{look}"
            kept.plot(count, shares, "o-", markersize=3.5, color=SERIES[look % len(SERIES)], label=short(name), gid=gid)
            look += 1
        hours = [(row.replicas, row.hours) for row in sizes.rows if row.hours is not None]
        color = SERIES[(look - len(lines)) % len(SERIES)]
        cost.plot([x for x, _ in hours], [y for _, y in hours], "o-", markersize=3.5, color=color)
    kept.axhline(wanted.share, **BOUND_STYLE)
    kept.set(ylim=(0, 1.04), xlabel="replicas", ylabel="kept objectives")
    kept.yaxis.set_major_formatter(PercentFormatter(1.0))
    cost.set(xlabel="replicas", ylabel="replica-hours per 1,000 requests")
    cost.set_ylim(bottom=0)
    for axes in (kept, cost):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(figure, kept)
    advice = " ".join(f"{sizes.name}: {sizes.advice(wanted)}" for sizes in found)
    text = (
        f"Left: share of all offered requests that kept {wanted}; the dashed line is the share that is wanted. Right: "
        f"what 1,000 requests that kept it cost. {advice}"
    )
    return Plot("How many replicas", text, figure)
