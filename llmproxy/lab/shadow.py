"""The report of `llmproxy shadow`: measured times beside simulated times, without and with llmproxy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import join
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import orjson
import yaml
from rich.console import Console

from llmproxy import __version__
from llmproxy.config import Config
from llmproxy.core.domain import Outcome
from llmproxy.lab.fleet.spec import MAX_NUM_SEQS, ReplicaSpec, SimulatedFleet
from llmproxy.lab.policies.by_name import own_name, plan_named
from llmproxy.lab.results.fleet_tables import print_sizes, sizes_of
from llmproxy.lab.results.objectives import NOTHING_WANTED, Objectives
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.recorder import RunRecorder
from llmproxy.lab.results.report import Extra, ExtraTable, page
from llmproxy.lab.results.result import GroupResult, Point, RunResult, SimulationResult, rounded, to_bytes
from llmproxy.lab.results.table import MISSING, milliseconds, print_tables, seconds
from llmproxy.lab.run.identity import IdentityReader
from llmproxy.lab.run.runs import Simulation, run_all
from llmproxy.lab.simulate import Unusable, settings
from llmproxy.lab.simulator.engine.profiles import PROFILES, Profile
from llmproxy.lab.traces import decisions
from llmproxy.lab.traces.arrival import TraceError
from llmproxy.lab.variants import resized
from llmproxy.tools.shadow.command import REPLICAS, REQUESTS

MEASURED = "measured"
WHO = (MEASURED, "your router, simulated", "llmproxy, simulated")
FIT_REQUESTS = 500
REQUESTS_MAX = 20_000
"""Maximum number of requests of a record that are simulated. Of a longer record, the last ones are."""
FITS = 2
PREFILL_SCALES = (1.0, 0.5, 2.0)
SIZES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
TIMES = (
    f"The row {MEASURED} has the times of your clients' requests on your replicas. All other rows are predicted: their "
    "times are virtual, and latencies deep in overload should not be taken as absolute."
)
CANNOT_KNOW = (
    ("Caches", "The engines' prefix caches as they were. The simulated ones begin empty, and evict by vLLM's rules."),
    ("Other traffic", "Requests that reach the replicas without the shadow. They are in the measured times alone."),
    ("Feedback", "Arrivals stay as they were. Clients that wait for an answer send sooner if it comes sooner."),
    ("Errors", "Failures of replicas and of the router are not repeated, and an answer that never came has a guessed"
     " length."),
    ("Engines", "Speeds are one known profile, scaled until the simulated times of your router fit the measured ones."
     " The first rows show how well they fit: a difference between them is an error of every other row."),
    ("Batch limit", "If the engines do not publish it, it is the most requests that ran while others waited, else"
     f" {MAX_NUM_SEQS}."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Taken:
    """The part of a shadow record that is simulated: its requests in the order of arrival, and the simulation."""

    records: list[Record]
    simulation: Simulation


def check_policy(policy: str, config: Config) -> None:
    """Raises Unusable for a policy that is unknown."""
    try:
        plan_named(policy, config)
    except ValueError as error:
        raise Unusable(f"--policy: {error}") from None


def predict(
    folder: Path, config: Config, policy: str, workers: int | None = None, config_file: Path | None = None
) -> None:
    """Simulates the record in `folder` with `policy`, the policy of the router, and with llmproxy.

    Writes `report.html`, `result.json` and `fleet.yaml`, and prints the figures. Raises Unusable.
    """
    # Each simulation reads its whole trace, and the record may have a day.
    with TemporaryDirectory(prefix="llmproxy-shadow-") as kept:
        try:
            facts = orjson.loads((folder / REPLICAS).read_bytes())
            taken = _taken(folder / REQUESTS, config, Path(kept) / REQUESTS)
        except (OSError, TraceError, ValueError) as error:
            raise Unusable(f"{folder}: nothing to report on: {error}") from None
        prefill_scale = _predict(folder, facts, taken, policy, workers)
    again = ["llmproxy", "simulate", "--trace", f"{folder / REQUESTS}", "--fleet", f"{folder / 'fleet.yaml'}"]
    again += [] if config_file is None else ["--config", f"{config_file}"]
    again += ["--prefill-scale", f"{prefill_scale:g}"]
    Console().print(f"Again, with other policies: {join(again)}", soft_wrap=True, markup=False)


def _predict(
    folder: Path, facts: Sequence[Mapping[str, Any]], taken: _Taken, policy: str, workers: int | None
) -> float:
    """Returns the prefill scale of the engines."""
    console, config = Console(), taken.simulation.config
    with Console(stderr=True).status("fitting the speed of the engines"):
        fleet, prefill_scale = _fitted(facts, taken, policy, workers)
    queried = sum(fact.get("queried_tokens", 0.0) for fact in facts)
    cached = sum(fact.get("hit_tokens", 0.0) for fact in facts) / queried if queried else None
    measured = _measured(taken.records, fleet, prefill_scale).model_copy(update={"hit_tokens_ratio": cached})
    own, names = own_name(config), sorted({max(1, round(len(facts) * share)) for share in SIZES} | {len(facts) + 1})
    simulation = replace(taken.simulation, fleet=fleet)
    tasks = [(simulation, Point(name, 1, 1.0, prefill_scale)) for name in (policy, own)]
    tasks += [(replace(simulation, fleet=resized(fleet, size)), Point(own, 1, 1.0, prefill_scale)) for size in names]
    with Console(stderr=True).status("simulating"):
        runs = {index: finished.run for index, finished in run_all(tasks, workers)}
    before, after, *sized = (runs[index] for index in range(len(tasks)))
    before = before.model_copy(update={"policy": f"{policy}, simulated"})
    after = after.model_copy(update={"policy": f"llmproxy ({own}), simulated"})
    result = SimulationResult(runs=[measured, before, after], config=_description(folder, fleet, taken, facts))
    sizes = sizes_of([("llmproxy", run) for run in sized])

    def draw() -> Sequence[Any]:
        from llmproxy.lab.results import plots

        return [plots.sizes_plot(sizes, NOTHING_WANTED)]

    advice = ExtraTable("Replicas", ("llmproxy",), [[one.advice(NOTHING_WANTED)] for one in sizes])
    cannot = ExtraTable("This prediction cannot know", ("", ""), CANNOT_KNOW)
    tables = (*_groups((measured, before, after)), _balance(facts, (before, after)), advice, cannot)
    try:
        (folder / "fleet.yaml").write_text(_fleet_file(fleet))
        (folder / "result.json").write_bytes(to_bytes(result))
        (folder / "report.html").write_text(
            page(result, "The effect of llmproxy", [after.policy], Extra(tables, draw, TIMES)), encoding="utf-8"
        )
    except OSError as error:
        raise Unusable(f"--out {folder}: {error.strerror}") from None
    finally:
        # The files come first: a pipe such as `| head` may close before the tables end.
        print_tables(result, console)
        print_sizes(sizes, NOTHING_WANTED, console)
    console.print(f"wrote {folder / 'report.html'}; its last table says what this prediction cannot know", markup=False)
    return prefill_scale


# --- the measured times ----------------------------------------------------------------------------------------------


def _taken(record: Path, config: Config, trace: Path) -> _Taken:
    """Reads the last requests of a record, and writes them to the file `trace`. Raises TraceError."""
    texts: deque[tuple[int, str]] = deque(maxlen=REQUESTS_MAX)
    with record.open() as opened:
        header = opened.readline()
        # The last line of a running shadow may be incomplete.
        texts.extend((number, text) for number, text in enumerate(opened, 2) if text.endswith("\n"))
    trace.write_text("".join((header, *(text for _, text in texts))))
    arrivals = decisions.arrivals(record, lambda: iter(texts))
    lines = sorted((orjson.loads(text) for _, text in texts), key=lambda line: line["at_s"])
    identities = IdentityReader(config)
    records = [
        Record(
            arrival,
            arrival.at_s,
            identities.band(arrival),
            Outcome(line["outcome"]),
            ended_s=arrival.at_s + line["duration_s"],
            ttft_s=line.get("ttft_s"),
            tpot_s=line.get("tpot_s"),
            hit_tokens=line.get("cached_tokens"),
            output_tokens=arrival.output_tokens,
        )
        for arrival, line in zip(arrivals, lines, strict=True)
    ]
    return _Taken(records, Simulation(str(trace), SimulatedFleet("", ()), config))


def _measured(records: Sequence[Record], fleet: SimulatedFleet, prefill_scale: float) -> RunResult:
    objectives = Objectives(fleet, prefill_scale)
    recorder = RunRecorder(max(record.arrived_s for record in records), ())
    for record in records:
        record.met = objectives.met(record)
        recorder.add(record)
    return recorder.result(MEASURED, 1, 1.0, prefill_scale)


# --- the speed of the engines -----------------------------------------------------------------------------------------


class _Speed(NamedTuple):
    """The speed of engines: a known profile, with factors on all times and on prompts, and seconds before an engine."""

    profile: str
    scale: float
    prefill: float = 1.0
    late_s: float = 0.0


def _fitted(
    facts: Sequence[Mapping[str, Any]], taken: _Taken, policy: str, workers: int | None
) -> tuple[SimulatedFleet, float]:
    """Returns the fleet whose simulated times under `policy` are nearest to the measured times, and its prefill
    scale. Raises Unusable.
    """
    measured = _measured(taken.records[:FIT_REQUESTS], _fleet(facts, _Speed("llama-8b-h100", 1.0)), 1.0)
    tpot_s = measured.tpot_s.p50
    if not tpot_s or not measured.ttft_s.p50:
        raise Unusable("the record has no stream that was completed, so that the speed of the engines is unknown")
    results: dict[_Speed, RunResult] = {}

    def simulate(tried: Sequence[_Speed]) -> list[_Speed]:
        """Returns all speeds so far, the nearest first."""
        part = replace(taken.simulation, requests=FIT_REQUESTS)
        tasks = [(replace(part, fleet=_fleet(facts, speed)), Point(policy, 1, 1.0, speed.prefill)) for speed in tried]
        results.update((tried[index], finished.run) for index, finished in run_all(tasks, workers))
        return sorted(results, key=lambda speed: _error(measured, results[speed]))

    real = {name: profile for name, profile in PROFILES.items() if name != "tiny"}
    near = simulate([_Speed(name, _step_ratio(taken, len(facts), profile)) for name, profile in real.items()])
    scaled = [one._replace(scale=one.scale * tpot_s / (results[one].tpot_s.p50 or tpot_s)) for one in near[:FITS]]
    tried = [one._replace(prefill=prefill) for one in scaled for prefill in PREFILL_SCALES]
    simulate(tried)
    # HTTP and tokenising take as long as is missing to the first token. Each speed gets its own, before one is chosen:
    # else a slow way to the engines would pass for slow prompts.
    late = [one._replace(late_s=_missing_s(measured, results[one])) for one in tried]
    speed = simulate(late)[0]
    return _fleet(facts, speed), speed.prefill


def _step_ratio(taken: _Taken, replicas: int, profile: Profile) -> float:
    """Returns the measured time per token over the time of a step of `profile` with the mean number of sequences."""
    records = taken.records[:FIT_REQUESTS]
    running_s = sum(record.ended_s - record.arrived_s for record in records)
    running = max(1, round(running_s / max(record.ended_s for record in records) / replicas))
    context_tokens = round(fmean(one.arrival.prompt_tokens + one.output_tokens / 2 for one in records))
    tpot_s = fmean(record.tpot_s for record in records if record.tpot_s is not None)
    return tpot_s / profile.step_s(running, running * context_tokens, [])


def _error(measured: RunResult, simulated: RunResult) -> float:
    """Returns the difference of the times of all tenants, whose prompts differ."""
    return sum(
        one.offered * (abs(math.log(mine / its)) if mine and its else 1.0)
        for one, other in _by_tenant(measured, simulated)
        for quantiles, others in ((one.ttft_s, other.ttft_s), (one.tpot_s, other.tpot_s))
        for mine, its in ((quantiles.p50, others.p50), (quantiles.p95, others.p95))
    )


def _missing_s(measured: RunResult, simulated: RunResult) -> float:
    """Returns the mean time that the simulated first tokens of tenants are too early."""
    found = [
        (one.offered, one.ttft_s.p50 - other.ttft_s.p50)
        for one, other in _by_tenant(measured, simulated)
        if one.ttft_s.p50 is not None and other.ttft_s.p50 is not None
    ]
    offered = sum(count for count, _ in found)
    return sum(count * missing_s for count, missing_s in found) / offered if offered else 0.0


def _by_tenant(measured: RunResult, simulated: RunResult) -> list[tuple[GroupResult, GroupResult]]:
    return [(one, simulated.by_tenant[name]) for name, one in measured.by_tenant.items() if name in simulated.by_tenant]


def _fleet(facts: Sequence[Mapping[str, Any]], speed: _Speed) -> SimulatedFleet:
    profile = _slower(PROFILES[speed.profile], speed)
    specs = []
    for fact in facts:
        kv_tokens = fact["kv_tokens"] or profile.kv_tokens
        limit = fact["batch_limit"] or fact["batch_seen"] or MAX_NUM_SEQS
        longest = min(fact["max_model_len"] or kv_tokens, kv_tokens - 16)
        specs.append(ReplicaSpec(fact["name"], speed.profile, profile, kv_tokens, longest, limit))
    return SimulatedFleet(f"{len(specs)} replicas like {speed.profile}, steps x{speed.scale:.2f}", tuple(specs))


def _slower(profile: Profile, speed: _Speed) -> Profile:
    def slower(pair: tuple[float, float]) -> tuple[float, float]:
        return speed.scale * pair[0], speed.scale * pair[1]

    return replace(
        profile,
        small_ms=slower(profile.small_ms),
        large_ms=slower(profile.large_ms),
        decode_ms=slower(profile.decode_ms),
        prefill_ms=slower(profile.prefill_ms),
        overhead_ms=speed.scale * profile.overhead_ms,
        frontend_s=max(0.0, profile.frontend_s + speed.late_s),
    )


def _fleet_file(fleet: SimulatedFleet) -> str:
    """Returns the fleet as a file for `llmproxy simulate`."""
    replicas = []
    for spec in fleet.replicas:
        costs = {name: cost for name, cost in asdict(spec.profile).items() if name != "prefill_factor"}
        profile = rounded(
            {"name": spec.profile_name, **{k: list(v) if isinstance(v, tuple) else v for k, v in costs.items()}}
        )
        sizes = {"kv_tokens": spec.kv_tokens, "max_model_len": spec.max_model_len, "max_num_seqs": spec.max_num_seqs}
        replicas.append({"name": spec.name, "profile": rounded(profile), **sizes})
    return f"# {fleet.name}\n{yaml.safe_dump({'replicas': replicas}, sort_keys=False)}"


# --- tables -----------------------------------------------------------------------------------------------------------


def _groups(runs: Sequence[RunResult]) -> Iterator[ExtraTable]:
    heads = ("", "", "requests", "in time", "TTFT p50, s", "TTFT p95, s", "TPOT p50, ms", "wait p95, s")
    for title, by in (("By band", "by_band"), ("By tenant", "by_tenant")):
        groups: list[Mapping[str, GroupResult]] = [getattr(run, by) for run in runs]
        rows = [
            (
                name, who, f"{one.offered:,}", _shown("{:.1%}".format, one.goodput), _shown(seconds, one.ttft_s.p50),
                _shown(seconds, one.ttft_s.p95), _shown(milliseconds, one.tpot_s.p50),
                _shown(seconds, one.queue_wait_s.p95),
            )
            for name in groups[0]
            for who, group in zip(WHO, groups, strict=True)
            if (one := group.get(name)) is not None
        ]  # fmt: skip
        yield ExtraTable(title, heads, rows)


def _balance(facts: Sequence[Mapping[str, Any]], simulated: Sequence[RunResult]) -> ExtraTable:
    """Returns the table of replicas. The measured figures come from their metrics, and have all of their traffic."""
    rows = []
    for fact in facts:
        counts = (fact.get("requests"), fact["running_mean"], fact["waiting_mean"])
        rows.append(_replica(fact["name"], WHO[0], counts, fact.get("hit_tokens"), fact.get("queried_tokens")))
        for who, run in zip(WHO[1:], simulated, strict=True):
            one = run.by_backend[fact["name"]]
            counts = (one.requests, one.mean_running, one.mean_waiting)
            rows.append(_replica(fact["name"], who, counts, one.hit_tokens, one.hit_tokens + one.prefill_tokens))
    return ExtraTable("Balance and caches", ("replica", "", "requests", "running", "waiting", "cached"), rows)


def _replica(
    name: str, who: str, counts: Sequence[float | None], hit_tokens: float | None, tokens: float | None
) -> list[str]:
    cached = hit_tokens / tokens if hit_tokens is not None and tokens else None
    requests, *means = counts
    shown = (_shown("{:.2f}".format, mean) for mean in means)
    return [name, who, _shown("{:,.0f}".format, requests), *shown, _shown("{:.1%}".format, cached)]


def _shown(write: Callable[[float], str], value: float | None) -> str:
    return MISSING if value is None else write(value)


def _description(
    folder: Path, fleet: SimulatedFleet, taken: _Taken, facts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "trace": str(folder / REQUESTS),
        "requests": len(taken.records),
        "trace_duration_s": taken.records[-1].arrived_s,
        "fleet": fleet.name,
        "replicas": len(facts),
        "facts": [dict(fact) for fact in facts],
        **settings(taken.simulation.config),
        "version": __version__,
    }
