"""The results of a set of runs, as tables for a terminal and as pages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.lab.scenarios.scenario import OURS, Found, Place
from benchmarks.lab.scenarios.statistics import Ratio, paired_ratio
from llmproxy.lab.policies.by_name import ORACLE
from llmproxy.lab.results.report import Extra, ExtraTable, page
from llmproxy.lab.results.result import SimulationResult, load_label, mean_of, row_of, to_bytes
from llmproxy.lab.run.runs import Finished

Runs = Callable[[Place, str, Sequence[int]], list[Finished]]  # Returns the runs of a policy at a place, by seed.

BOUNDS = ("utilisation", "ttft_p99_pooled", "ttft_p99_floor", "hit_pooled_lru", "lora_static_hit", "vtc_difference")
FIGURES = ("goodput", "TTFT p50", "TTFT p99", "TPOT p99 ms", "hit", "imbalance", "refused", "failed", "apart ktok")
GOAL_HEADS = ("goal", "measured", "wanted", "")


def print_place(console: Console, place: Place, runs: Mapping[str, Sequence[Finished]]) -> None:
    """Prints a row for every policy at a place, and the bounds below the table."""
    title = f"{place.label} (rate x{place.rate_scale:g})"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    for name in (place.scenario.decides.name, *FIGURES, f"{OURS[0]} / it"):
        table.add_column(name, justify="right")
    for policy, some in runs.items():
        ratio = versus(place, runs.get(OURS[0], ()), some) if policy not in OURS else None
        style = "bold" if policy in OURS else ""
        table.add_row(policy, *_figures(place, some), str(ratio) if ratio else "", style=style)
    console.print(table)
    bounds = [(name, bound) for name in BOUNDS if (bound := place.bounds.get(name)) and bound.value]
    shown = "; ".join(f"{name} {bound.value:.4g} {bound.unit}" for name, bound in bounds)
    console.print(f"  bounds: {shown}\n", soft_wrap=True)


def found_at(place: Place, runs: Runs, seeds: Sequence[int]) -> Found:
    """Returns all results of a place."""
    by_policy = {policy: runs(place, policy, seeds) for policy in place.case.policies}
    beside = {one.name: runs(place.beside(one), one.policy, seeds) for one in place.case.beside}
    return Found(
        place,
        {policy: [one.run for one in some] for policy, some in by_policy.items()},
        {name: [one.run for one in some] for name, some in beside.items()},
    )


def goal_rows(found: Found) -> list[list[str]]:
    """Returns a row for each goal of a place; no rows while a run of the place is missing."""
    goals = found.place.case.goals
    if goals is None or not all(found.runs.values()) or not all(found.beside.values()):
        return []
    return [
        [
            goal.name,
            "none" if goal.measured is None else f"{goal.measured:.4g}",
            f"{'>=' if goal.at_least else '<='} {goal.wanted:.4g}{f' ({goal.about})' if goal.about else ''}",
            "" if goal.measured is None else "met" if goal.met else "MISSED",
        ]
        for goal in goals(found)
    ]


def print_goals(console: Console, found: Found) -> None:
    """Prints the goals of a place."""
    if rows := goal_rows(found):
        table = Table(*GOAL_HEADS, box=box.SIMPLE_HEAD, padding=(0, 1))
        for row in rows:
            table.add_row(*row)
        console.print(table)


def versus(place: Place, ours: Sequence[Finished], theirs: Sequence[Finished]) -> Ratio | None:
    """Returns the ratio of the figure that decides.

    A ratio above 1 is better for `ours`, also if a smaller figure is better. None if no seed has both
    figures, or if a figure is 0.
    """
    metric = place.scenario.decides
    by_seed = {one.run.point.seed: metric.of(one.run) for one in theirs}
    pairs = [(metric.of(one.run), by_seed.get(one.run.point.seed)) for one in ours]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    good, other = [a for a, _ in known], [b for _, b in known]
    return paired_ratio(good, other) if metric.higher else paired_ratio(other, good)


def print_verdicts(console: Console, found: Sequence[Place], runs: Runs, seeds: Sequence[int]) -> None:
    """Prints for each load how our policy compares with the best other policy."""
    ratio = f"{OURS[0]} / best other, prefill x1 and x1.9"
    heads = ("place", "decides", OURS[0], "best other", "oracle", ratio, "verdict")
    table = Table(*heads, title=f"Where {OURS[0]} ranks", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for group in _grouped(found, lambda place: (place.scenario.key, place.case.name, place.load)):
        first = group[0]
        rival = _best_other(first, runs, seeds)
        if rival is None or not all(runs(place, policy, seeds) for place in group for policy in (OURS[0], rival)):
            continue
        ratios = [versus(place, runs(place, OURS[0], seeds), runs(place, rival, seeds)) for place in group]
        ours, other, oracle = (_number(_mean(first, runs(first, policy, seeds))) for policy in (OURS[0], rival, ORACLE))
        table.add_row(
            first.label.rpartition(",")[0],
            first.scenario.decides.name,
            ours,
            f"{other} {rival}",
            oracle,
            "  ".join(str(ratio) if ratio else "none" for ratio in ratios),
            verdict(ratios),
        )
    if table.rows:
        console.print(table)


def verdict(ratios: Sequence[Ratio | None]) -> str:
    """Returns "ahead" or "behind" if the intervals of all ratios say so, otherwise "open".

    With a single seed there are no intervals, and the means are compared. Without a ratio, the result is "no ratio".
    """
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        return "no ratio"
    if any(ratio.low is None for ratio in known):
        if all(ratio.mean > 1.01 for ratio in known):
            return "looks ahead (one seed)"
        return "looks behind (one seed)" if all(ratio.mean < 0.99 for ratio in known) else "level (one seed)"
    if all(ratio.above_one is True for ratio in known):
        return "ahead"
    return "behind" if all(ratio.above_one is False for ratio in known) else "open"


def write_pages(out: Path, found: Sequence[Place], runs: Runs, seeds: Sequence[int]) -> None:
    """Writes for each case with runs a folder with result.json and report.html."""
    for group in _grouped(found, lambda place: (place.scenario.key, place.case.name)):
        case, scenario = group[0].case, group[0].scenario
        some = [one for place in group for policy in case.policies for one in runs(place, policy, seeds)]
        goals = {place.label: rows for place in group if (rows := goal_rows(found_at(place, runs, seeds)))}
        result = SimulationResult(
            runs=[one.run for one in some],
            bounds={load_label(place.rate_scale, place.prefill_scale): dict(place.bounds) for place in group},
            config={
                "workload": f"{scenario.key} {scenario.title}",
                "case": case.name,
                "about": scenario.about,
                "decides": scenario.decides.name,
                "trace": case.trace,
                "fleet": group[0].fleet.name,
                "seeds": list(seeds),
                "goals": {label: [" ".join(row).strip() for row in rows] for label, rows in goals.items()},
                "loads": {load_label(place.rate_scale, place.prefill_scale): place.load for place in group},
            },
        )
        folder = out / scenario.key.lower() / "".join(c if c.isalnum() else "-" for c in case.name.lower())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_bytes(to_bytes(result))
        extra = Extra([ExtraTable(f"Goals: {label}", GOAL_HEADS, rows) for label, rows in goals.items()], None)
        html = page(result, f"{scenario.key} {scenario.title}: {case.name}", OURS, extra)
        (folder / "report.html").write_text(html, encoding="utf-8")


def _figures(place: Place, some: Sequence[Finished]) -> list[str]:
    row = row_of("", [one.run for one in some])
    apart = mean_of(one.run.service_difference_tokens for one in some)
    return [
        _number(_mean(place, some)),
        _share(row.goodput),
        _number(row.ttft_p50_s),
        _number(row.ttft_p99_s),
        _number(row.tpot_p99_s, 1e3),
        _share(row.hit),
        _number(row.imbalance),
        _share(row.refused),
        _share(row.failed),
        _number(apart, 1e-3),
    ]


def _mean(place: Place, some: Sequence[Finished]) -> float | None:
    return mean_of(place.scenario.decides.of(one.run) for one in some)


def _number(figure: float | None, factor: float = 1.0) -> str:
    return "–" if figure is None else f"{factor * figure:.3g}"


def _share(figure: float | None) -> str:
    return "–" if figure is None else f"{100 * figure:.1f}%"


def _best_other(place: Place, runs: Runs, seeds: Sequence[int]) -> str | None:
    """Returns the best policy that is neither ours in any form nor the oracle; None without one."""
    sign = 1.0 if place.scenario.decides.higher else -1.0
    rivals = {
        policy: figure
        for policy in place.case.policies
        if not policy.startswith((*OURS, "late_")) and policy != ORACLE
        if (figure := _mean(place, runs(place, policy, seeds))) is not None
    }
    return max(rivals, key=lambda policy: sign * rivals[policy], default=None)


def _grouped(found: Sequence[Place], key: Callable[[Place], Hashable]) -> list[list[Place]]:
    groups: dict[Hashable, list[Place]] = {}
    for place in found:
        groups.setdefault(key(place), []).append(place)
    return list(groups.values())
