"""What the set found: tables for a terminal, and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.lab.scenarios.scenario import OURS, Found, Place
from benchmarks.lab.scenarios.statistics import Ratio, paired_ratio
from benchmarks.lab.scenarios.tuning import Runs, Tuned
from llmproxy.lab.policies.by_name import ORACLE
from llmproxy.lab.results.report import Extra, ExtraTable, ReportUnavailable, page
from llmproxy.lab.results.result import SimulationResult, load_label, to_bytes
from llmproxy.lab.run.runs import Finished

BOUNDS = ("utilisation", "ttft_p99_pooled", "ttft_p99_floor", "hit_pooled_lru", "lora_static_hit", "vtc_difference")

GOAL_HEADS = ("goal", "measured", "wanted", "")


def print_place(console: Console, place: Place, runs: Mapping[str, Sequence[Finished]]) -> None:
    """One table: every policy that was run at one place, and below it the bounds and what was not run."""
    missing = [policy for policy, some in runs.items() if not some]
    if len(missing) == len(runs):
        console.print(f"{place.label}: not run\n", soft_wrap=True)
        return
    metric = place.scenario.decides
    title = f"{place.label} (rate x{place.rate_scale:g})"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    for name in (
        metric.name,
        "goodput",
        "TTFT p50",
        "TTFT p99",
        "TPOT p99 ms",
        "hit",
        "imbalance",
        "refused",
        "failed",
        "apart ktok",
    ):
        table.add_column(name, justify="right")
    table.add_column(f"{OURS[0]} / it", justify="right", no_wrap=True)
    for policy, some in runs.items():
        if not some:
            continue
        ratio = versus(place, runs.get(OURS[0], ()), some) if policy not in OURS else None
        table.add_row(
            policy, *_figures(place, some), str(ratio) if ratio else "", style="bold" if policy in OURS else ""
        )
    console.print(table)
    bounds = [
        f"{name} {bound.value:.4g} {bound.unit}" for name in BOUNDS if (bound := place.bounds.get(name)) and bound.value
    ]
    if missing:
        console.print(f"  not run: {', '.join(missing)}", soft_wrap=True)
    console.print(f"  bounds: {'; '.join(bounds)}\n", soft_wrap=True)


def found_at(place: Place, policies: Mapping[str, Sequence[str]], runs: Runs, seeds: Sequence[int]) -> Found:
    """Everything that was run at one place."""
    by_policy = {policy: runs(place, policy, seeds) for policy in policies[place.label]}
    beside = {one.name: runs(place.beside(one), one.policy, seeds) for one in place.case.beside}
    return Found(
        place,
        {policy: [one.run for one in some] for policy, some in by_policy.items()},
        {name: [one.run for one in some] for name, some in beside.items()},
    )


def goal_rows(found: Found) -> list[list[str]]:
    """One row for each goal of a place: what it is, the measured value, the wanted one, and whether it was met. None
    while anything is missing that a goal may compare with.
    """
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
    """What was hoped for at a place, and what came."""
    rows = goal_rows(found)
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in GOAL_HEADS:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def versus(place: Place, ours: Sequence[Finished], theirs: Sequence[Finished]) -> Ratio | None:
    """How many times better ours is in the figure that decides; above 1 is better whichever end of it is good."""
    metric = place.scenario.decides
    by_seed = {one.run.point.seed: metric.of(one.run) for one in theirs}
    pairs = [(metric.of(one.run), by_seed.get(one.run.point.seed)) for one in ours]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    good, other = [a for a, _ in known], [b for _, b in known]
    return paired_ratio(good, other) if metric.higher else paired_ratio(other, good)


def print_verdicts(
    console: Console, found: Sequence[Place], policies: Mapping[str, Sequence[str]], runs: Runs, seeds: Sequence[int]
) -> None:
    """Where our policy stands: ahead or behind only where both costs of a prompt token say so."""
    table = Table(title=f"Where {OURS[0]} stands", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in (
        "place",
        "decides",
        OURS[0],
        "best other",
        "oracle",
        f"{OURS[0]} / best other, prefill x1 and x1.9",
        "verdict",
    ):
        table.add_column(name)
    for group in _by_load(found):
        first = group[0]
        if OURS[0] not in policies[first.label]:
            continue
        ours = [_mean(p, runs(p, OURS[0], seeds)) for p in group]
        rival = _best_other(first, policies[first.label], runs, seeds)
        if rival is None or not all(runs(p, policy, seeds) for p in group for policy in (OURS[0], rival)):
            continue
        ratios = [versus(p, runs(p, OURS[0], seeds), runs(p, rival, seeds)) for p in group]
        table.add_row(
            first.label.rpartition(",")[0],
            first.scenario.decides.name,
            _number(ours[0]),
            f"{_number(_mean(first, runs(first, rival, seeds)))} {rival}",
            _number(_mean(first, runs(first, ORACLE, seeds))),
            "  ".join(str(ratio) if ratio else "none" for ratio in ratios),
            verdict(ratios),
        )
    if table.rows:
        console.print(table)


def verdict(ratios: Sequence[Ratio | None]) -> str:
    """Ahead or behind where every interval says so, else open; without intervals, how it looks."""
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


def write_pages(
    out: Path,
    found: Sequence[Place],
    policies: Mapping[str, Sequence[str]],
    runs: Runs,
    seeds: Sequence[int],
    tuned: Mapping[str, Tuned],
) -> None:
    """One folder per case of which anything was run, with its result.json (which says what was tried while tuning) and
    report.html.
    """
    for group in _by_case(found):
        case, scenario = group[0].case, group[0].scenario
        judged = [found_at(place, policies, runs, seeds) for place in group]
        goals = {one.place.label: rows for one in judged if (rows := goal_rows(one))}
        some = [one for place in group for policy in policies[place.label] for one in runs(place, policy, seeds)]
        if not some:
            continue
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
                "tuning": {
                    name: {"tried": dict(one.figures), "taken": one.best}
                    for name, one in tuned.items()
                    if one.workload == scenario.key
                },
                "goals": {label: [" ".join(row).strip() for row in rows] for label, rows in goals.items()},
                "loads": {load_label(p.rate_scale, p.prefill_scale): p.load for p in group},
            },
        )
        folder = out / scenario.key.lower() / "".join(c if c.isalnum() else "-" for c in case.name.lower())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_bytes(to_bytes(result))
        trails = {one.run.point: one.trail for one in some if one.run.point.seed == seeds[0]}
        try:
            title = f"{scenario.key} {scenario.title}: {case.name}"
            html = page(result, trails, title, OURS, _extra(judged, goals))
            (folder / "report.html").write_text(html, encoding="utf-8")
        except ReportUnavailable as error:
            print(f"no report.html: {error}")


def _extra(judged: Sequence[Found], goals: Mapping[str, Sequence[Sequence[str]]]) -> Extra:
    draw = judged[0].place.case.plots
    tables = [ExtraTable(f"Goals: {label}", GOAL_HEADS, rows) for label, rows in goals.items()]
    return Extra(tables, None if draw is None else lambda: draw(judged))


def _figures(place: Place, some: Sequence[Finished]) -> list[str]:
    all_runs = [one.run for one in some]
    decisive = _mean(place, some)
    return [
        _number(decisive),
        _share(run.goodput for run in all_runs),
        _number(_known(run.ttft_s.p50 for run in all_runs)),
        _number(_known(run.ttft_s.p99 for run in all_runs)),
        _number(_known(None if run.tpot_s.p99 is None else 1e3 * run.tpot_s.p99 for run in all_runs)),
        _share(run.hit_tokens_ratio for run in all_runs),
        _number(_known(run.prefill_imbalance for run in all_runs)),
        _share(run.refused / run.offered for run in all_runs if run.offered),
        _share(run.failed / run.offered for run in all_runs if run.offered),
        _number(_known(_kilo(run.service_difference_tokens) for run in all_runs)),
    ]


def _mean(place: Place, some: Sequence[Finished]) -> float | None:
    return _known(place.scenario.decides.of(one.run) for one in some)


def _known(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return fmean(known) if known else None


def _kilo(figure: float | None) -> float | None:
    return None if figure is None else figure / 1e3


def _number(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.3g}"


def _share(figures: Iterable[float | None]) -> str:
    figure = _known(figures)
    return "–" if figure is None else f"{100 * figure:.1f}%"


def _best_other(place: Place, policies: Sequence[str], runs: Runs, seeds: Sequence[int]) -> str | None:
    """The best policy that is neither ours in any form nor the oracle."""
    sign = 1.0 if place.scenario.decides.higher else -1.0
    rivals = {
        policy: figure
        for policy in policies
        if not policy.startswith((*OURS, "late_")) and policy != ORACLE
        if (figure := _mean(place, runs(place, policy, seeds))) is not None
    }
    return max(rivals, key=lambda policy: sign * rivals[policy], default=None)


def _by_load(found: Sequence[Place]) -> list[list[Place]]:
    """Places that differ in the cost of a prompt token alone."""
    groups: dict[tuple[str, str, float | None], list[Place]] = {}
    for place in found:
        groups.setdefault((place.scenario.key, place.case.name, place.load), []).append(place)
    return list(groups.values())


def _by_case(found: Sequence[Place]) -> list[list[Place]]:
    groups: dict[tuple[str, str], list[Place]] = {}
    for place in found:
        groups.setdefault((place.scenario.key, place.case.name), []).append(place)
    return list(groups.values())
