"""Runs `llmproxy simulate`, and writes a table, `result.json` and `report.html`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.main import IncEx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llmproxy import __version__
from llmproxy.config import Config
from llmproxy.lab.fleet.fleet_file import FleetError, fleet_named
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.policies.bounds import all_bounds
from llmproxy.lab.policies.by_name import ORACLE, PolicyPlan, is_own, own_name, plan_named
from llmproxy.lab.results.fleet_tables import Sizes, print_sizes, sizes_of
from llmproxy.lab.results.objectives import Wanted
from llmproxy.lab.results.report import Extra, page
from llmproxy.lab.results.result import Bound, Point, SimulationResult, load_label, to_bytes
from llmproxy.lab.results.table import print_tables
from llmproxy.lab.run.runs import Finished, Simulation, points, prepared, run_all
from llmproxy.lab.traces import Survey
from llmproxy.lab.traces.arrival import Trace, TraceError
from llmproxy.lab.variants import fleets, labelled

if TYPE_CHECKING:
    from llmproxy.lab.results.plots import Plot

FILES = ("result.json", "report.html")
SCALE_LEAST, SCALE_MOST = 1e-3, 1e3
READ = frozenset(("bands", "health", "models", "poll", "queue", "retry", "scaling", "tenants", "timeouts"))
"""The sections of the configuration that a simulation reads, beside `scheduling` and the limits of `backends`."""
HIDDEN: IncEx = {"tenants": {"__all__": {"keys", "cache_salt"}}}


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of the command line; see the help of its flags."""

    trace: str
    fleet: str
    config: Config
    policies: tuple[str, ...]
    rate_scales: tuple[float, ...]
    prefill_scales: tuple[float, ...]
    seeds: tuple[int, ...]
    replicate: int = 1
    skip: int = 0
    requests: int | None = None
    warmup: float = 0.0
    proxies: int | None = None
    scales: tuple[str, ...] = ()
    sizes: str | None = None
    objective: str | None = None
    workers: int | None = None
    out: Path | None = None
    oracle: bool = True


class Unusable(Exception):  # noqa: N818 - an answer for people, not an error of this code
    """The simulation cannot run. The message says why and what to do."""


def simulate(options: SimulateOptions) -> None:
    """Runs everything, prints tables and writes the files. Raises Unusable."""
    try:
        _simulate(options)
    except (TraceError, FleetError) as error:
        raise Unusable(str(error)) from None


def _simulate(options: SimulateOptions) -> None:
    console = Console()
    wanted = [*(options.policies or (own_name(options.config),)), *((ORACLE,) if options.oracle else ())]
    try:
        plans = {plan.name: plan for plan in (plan_named(policy, options.config) for policy in wanted)}
    except ValueError as error:
        raise Unusable(str(error)) from None
    rates, prefills = dict.fromkeys(options.rate_scales), dict.fromkeys(options.prefill_scales)
    for name, scales in (("rate", rates), ("prefill", prefills)):
        for scale in scales:
            if not SCALE_LEAST <= scale <= SCALE_MOST:
                raise Unusable(f"--{name}-scale {scale:g}: should be from {SCALE_LEAST:g} to {SCALE_MOST:g}")
    fleet = fleet_named(options.fleet)
    if options.proxies is not None:
        fleet = replace(fleet, proxies=options.proxies)
    simulation = Simulation(
        options.trace, fleet, options.config, options.skip, options.requests, options.replicate, options.warmup,
        wanted=_wanted(options),
    )  # fmt: skip
    try:
        tried = fleets(fleet, options.scales, options.sizes)
    except ValueError as error:
        raise Unusable(str(error)) from None
    chosen = points(tuple(plans), options.seeds, tuple(rates), tuple(prefills))
    # The whole trace is read before anything runs, so that a bad line at its end does not cost an hour.
    with Console(stderr=True).status(f"reading {escape(options.trace)}"):
        found = [prepared(simulation, point.seed, point.rate_scale)[1] for point in chosen]
    _check(options, fleet, prepared(simulation, chosen[0].seed, chosen[0].rate_scale))
    if options.out is not None:
        _make_room(options.out)
    tasks = [(replace(simulation, fleet=one), point) for one in tried.values() for point in chosen]
    plain = _run(tasks, [one.count for one in found] * len(tried), options.workers)
    by_label = {label: plain[i * len(chosen) : (i + 1) * len(chosen)] for i, label in enumerate(tried)}
    finished = list(labelled(by_label))
    sizes = sizes_of([(one.run.policy, one.run) for one in plain]) if options.sizes is not None else []
    # Bounds need a single fleet.
    with Console(stderr=True).status("computing bounds"):
        bounds = _bounds(simulation, chosen) if len(tried) == 1 and not sizes else {}
    result = SimulationResult(
        runs=[one.run for one in finished],
        bounds=bounds,
        config=_description(options, fleet, list(plans.values()), found[0]),
    )
    try:
        # The files come first: a pipe such as `| head` may close before the tables end.
        if options.out is not None:
            own = [one.run.policy for one, as_named in zip(finished, plain, strict=True) if is_own(as_named.run.policy)]
            _write(options.out, options, result, own, _extra(finished, sizes, simulation.wanted))
    finally:
        _print(console, result, found[0], sizes, simulation.wanted)
    if options.out is not None:
        for name in FILES:
            console.print(f"wrote {options.out / name}", soft_wrap=True, markup=False)


def _print(console: Console, result: SimulationResult, found: Survey, sizes: Sequence[Sizes], wanted: Wanted) -> None:
    if found.guessed:
        guessed = f"{found.guessed:,} of {found.count:,} requests got no answer when the trace was taken"
        console.print(f"{guessed}: each is given the mean length of its model's answers", markup=False)
    if sizes:
        print_sizes(sizes, wanted, console)
    else:
        print_tables(result, console)
    for run in result.runs:
        if run.replicas is not None:
            scaled = run.replicas
            text = f"{scaled.mean:.2f} replicas on average, {scaled.peak} at most, {scaled.turns} turns,"
            text += f" objectives missed for {scaled.violated_s:.0f} s"
            console.print(f"{run.policy}, seed {run.seed}: {text}", markup=False)


def _wanted(options: SimulateOptions) -> Wanted:
    """Parses the objectives of the options. Raises Unusable."""
    try:
        return Wanted() if options.objective is None else Wanted.parsed(options.objective)
    except ValueError as error:
        raise Unusable(f"--objective {options.objective}: {error}") from None


def _extra(finished: Sequence[Finished], sizes: Sequence[Sizes], wanted: Wanted) -> Extra:
    """Returns the report's parts about scaling and fleet sizes, for the first seed and load."""
    scaled = {one.run.policy: one.trail for one in reversed(finished) if one.trail.scaled}
    if not scaled and not sizes:
        return Extra()

    def draw() -> list[Plot]:
        from llmproxy.lab.results import plots

        drawn = [plots.sizes_plot(sizes, wanted)] if sizes else []
        return [*drawn, plots.replicas_plot(list(scaled.items())[::-1])] if scaled else drawn

    return Extra(draw=draw)


def _check(options: SimulateOptions, fleet: SimulatedFleet, read: tuple[Trace, Survey]) -> None:
    """Checks that trace, fleet and configuration fit together. Raises Unusable."""
    trace, found = read
    block_size = fleet.replicas[0].block_size
    if trace.block_tokens % block_size:
        raise Unusable(
            f"{trace.name}: blocks of {trace.block_tokens} tokens are no multiple of the engines' {block_size}"
            " (block_size in the fleet's file)"
        )
    if found.adapters and (none := [spec.name for spec in fleet.replicas if spec.max_loras < 1]):
        raise Unusable(f"{trace.name} asks for adapters, and max_loras is 0 at {', '.join(none[:5])}")
    for band in found.bands:
        try:
            options.config.band(band)
        except ValueError as error:
            raise Unusable(f"{trace.name}: {error}") from None


def _make_room(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            # Try it before an hour of simulation, not after it.
            with (out / name).open("ab"):
                pass
    except OSError as error:
        raise Unusable(f"--out {out}: {error.strerror}") from None


def _run(tasks: Sequence[tuple[Simulation, Point]], totals: Sequence[int], workers: int | None) -> list[Finished]:
    finished: list[Finished | None] = [None] * len(tasks)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"0/{len(tasks)} runs", total=sum(totals))

        def show(ended: Sequence[int]) -> None:
            done = sum(one is not None for one in finished)
            bar.update(task, completed=sum(ended), description=f"{done}/{len(tasks)} runs")

        for index, one in run_all(tasks, workers, show):
            finished[index] = one
    return [one for one in finished if one is not None]


def _bounds(simulation: Simulation, chosen: Sequence[Point]) -> dict[str, dict[str, Bound]]:
    """Maps each load to its bounds, for the first seed."""
    first = chosen[0].seed
    loads = dict.fromkeys((point.rate_scale, point.prefill_scale) for point in chosen)
    return {
        load_label(rate, prefill): all_bounds(trace, simulation.fleet, prefill, simulation.warmup * found.duration_s)
        for rate, prefill in loads
        for trace, found in (prepared(simulation, first, rate),)
    }


def _description(
    options: SimulateOptions, fleet: SimulatedFleet, plans: Sequence[PolicyPlan], found: Survey
) -> dict[str, Any]:
    """Returns the inputs of the simulation, so that it can be repeated."""
    inputs: dict[str, Any] = {
        "trace": Path(options.trace).name if not options.trace.startswith("gen:") else options.trace,
        "requests": found.count,
        "trace_duration_s": found.duration_s,
        "answers_guessed": found.guessed,
        "skip": options.skip,
        "replicate": options.replicate,
        "warmup": options.warmup,
        "fleet": fleet.name,
        "replicas": len(fleet.replicas),
        "faults": len(fleet.faults),
        "proxies": fleet.proxies,
        "seeds": list(options.seeds),
        "policies": {plan.name: plan.about for plan in plans},
        "objective": options.objective,
        "scale": list(options.scales),
        "fleet_size": options.sizes,
        **settings(options.config),
        "version": __version__,
    }
    return {name: value for name, value in inputs.items() if value not in (None, [], {})}


def settings(config: Config) -> dict[str, Any]:
    """Returns the scheduling settings, and all other settings that a simulation reads, if they are no defaults."""
    changed = config.model_dump(mode="json", exclude_defaults=True, include=set(READ), exclude=HIDDEN)
    return {
        "scheduling": config.scheduling.model_dump(mode="json"),
        "queue_max_wait_s": config.queue.max_wait_s,
        "max_in_flight": {one.name: one.max_in_flight for one in config.backends if one.max_in_flight is not None},
        "configuration": changed,
    }


def _write(out: Path, options: SimulateOptions, result: SimulationResult, own: Sequence[str], extra: Extra) -> None:
    try:
        (out / "result.json").write_bytes(to_bytes(result))
        title = f"{Path(options.trace).name} on {Path(options.fleet).name}"
        (out / "report.html").write_text(page(result, title, own, extra), encoding="utf-8")
    except OSError as error:
        raise Unusable(f"--out {out}: {error.strerror}") from None
