"""Which cases there are, which figures each gives, and the table that is made of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.loadgen import Plan, Result, Spread

DIRECT = "direct"
FOREIGN_SHARE_MAX = 0.1
HARNESS_SHARE_MAX = 0.85
Rounds = list[dict[str, dict[str, Result]]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: `of` takes it out of a result, or gives None where that result has no such figure.

    `added` says that the difference to direct access means something.
    """

    name: str
    of: Callable[[Result], float | None]
    added: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One load, the same for everybody; `direct` is False where there is nothing to compare with."""

    name: str
    title: str
    plan: Plan
    figures: tuple[Figure, ...]
    direct: bool = True


def percentiles(what: str, of: Callable[[Result], Spread | None]) -> tuple[Figure, Figure]:
    def p50(result: Result) -> float | None:
        spread = of(result)
        return spread.p50_us if spread else None

    def p99(result: Result) -> float | None:
        spread = of(result)
        return spread.p99_us if spread else None

    return Figure(f"{what} p50, µs", p50, added=True), Figure(f"{what} p99, µs", p99, added=True)


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or not whole else part / whole


def _cpu_us_per(count: Callable[[Result], int]) -> Callable[[Result], float | None]:
    return lambda r: None if r.proxy_cpu_s is None or not count(r) else r.proxy_cpu_s * 1e6 / count(r)


def _rss_added_mb(result: Result) -> float | None:
    if result.rss_before_bytes is None or result.rss_after_bytes is None:
        return None
    return (result.rss_after_bytes - result.rss_before_bytes) / 1e6


CORE_USE = Figure("core use, %", lambda r: None if r.proxy_cpu_s is None else 100 * r.proxy_cpu_s / r.window_s)
REQUESTS_PER_S = Figure("requests/s", lambda r: r.requests / r.window_s)
REQUESTS_PER_CORE = Figure("requests/s per core", lambda r: r.requests / r.proxy_cpu_s if r.proxy_cpu_s else None)
CPU_PER_REQUEST = Figure("CPU per request, µs", _cpu_us_per(lambda r: r.requests))
CPU_PER_CHUNK = Figure("CPU per chunk, µs", _cpu_us_per(lambda r: r.chunks))
CHUNKS_PER_S = Figure("chunks/s", lambda r: r.chunks / r.window_s)
RSS_READY = Figure("RSS ready, MB", lambda r: r.rss_before_bytes and r.rss_before_bytes / 1e6)
RSS_AFTER = Figure("RSS after it, MB", lambda r: r.rss_after_bytes and r.rss_after_bytes / 1e6)
RSS_ADDED = Figure("RSS added by 1,000 streams, MB", _rss_added_mb)
LATENCY = percentiles("request", lambda r: r.latency)
STREAM = (
    *percentiles("TTFT", lambda r: r.ttft),
    *percentiles("chunk transit", lambda r: r.transit),
    *percentiles("inter-chunk", lambda r: r.gap),
)

CASES = (
    Case(
        "idle",
        "1,000 idle streams, fresh process",
        Plan(target="", shape="idle", clients=1000, chunks=2, warmup_s=1.0, seconds=0.5),
        (RSS_READY, RSS_ADDED),
        direct=False,
    ),
    Case(
        "json",
        "JSON, 64 connections, closed loop",
        Plan(target="", clients=64),
        (REQUESTS_PER_S, REQUESTS_PER_CORE, CPU_PER_REQUEST, CORE_USE),
    ),
    Case(
        "json500",
        "JSON, 500 req/s, open loop",
        Plan(target="", shape="open", clients=1024, rate=500.0),
        (REQUESTS_PER_S, CPU_PER_REQUEST, CORE_USE, *LATENCY),
    ),
    Case(
        "sse500",
        "streams of 4 chunks x 10 ms, 500 req/s, open loop",
        Plan(target="", shape="open", clients=1024, rate=500.0, chunks=4, interval_us=10_000),
        (REQUESTS_PER_S, CPU_PER_REQUEST, CORE_USE, *STREAM),
    ),
    Case(
        "sse64",
        "64 streams of 100 chunks x 10 ms",
        Plan(target="", clients=64, chunks=100, interval_us=10_000),
        (CHUNKS_PER_S, CPU_PER_CHUNK, CORE_USE, *STREAM),
    ),
    Case(
        "sse1000",
        "1,000 streams of 100 chunks x 50 ms",
        Plan(target="", clients=1000, chunks=100, interval_us=50_000, warmup_s=1.0),
        (CHUNKS_PER_S, CPU_PER_CHUNK, CORE_USE, *STREAM, RSS_AFTER),
    ),
)


# --- the table --------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def cell(values: Sequence[float], sign: str = "") -> str:
    """Median and spread over the rounds; a dash where there is nothing."""
    if not values:
        return "–"
    median = statistics.median(values)
    plus = sign if median > 0 else ""
    return f"{plus}{number(median)} [{number(min(values))}..{number(max(values))}]"


def _paired(
    rounds: Rounds, case: Case, figure: Figure, names: tuple[str, str], join: Callable[[float, float], float]
) -> list[float]:
    """`join(first, second)` inside each round: what both columns suffered alike falls out."""
    joined = []
    for one in rounds:
        first, second = (figure.of(one[case.name][name]) if name in one[case.name] else None for name in names)
        if first is not None and second:
            joined.append(join(first, second))
    return joined


def _row(rounds: Rounds, case: Case, figure: Figure, names: Sequence[str]) -> list[str]:
    cells = []
    for name in (DIRECT, *names):
        results = [one[case.name][name] for one in rounds if name in one[case.name]]
        cells.append(cell([value for result in results if (value := figure.of(result)) is not None]))
        if name != DIRECT:
            less = _paired(rounds, case, figure, (name, DIRECT), lambda a, b: a - b) if figure.added else []
            cells.append(cell(less, sign="+"))
    cells += [cell(_paired(rounds, case, figure, (name, names[0]), lambda a, b: a / b)) for name in names[1:]]
    return [figure.name, *cells]


def render(rounds: Rounds, names: Sequence[str]) -> str:
    """The whole markdown table; with several proxies each is also given as a ratio to the first."""
    head = ["figure", DIRECT]
    for name in names:
        head += [name, f"{name} added"]
    head += [f"{name} ÷ {names[0]}" for name in names[1:]]
    lines = [head, ["---", *("--:" for _ in head[1:])]]
    for case in CASES:
        if case.name in rounds[0]:
            lines.append([f"**{case.title}** (`{case.name}`)", *("" for _ in head[1:])])
            lines += [_row(rounds, case, figure, names) for figure in case.figures]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def warnings(rounds: Rounds, harness_cores: int) -> list[str]:
    """Reasons to doubt a figure: failed requests, a busy measuring side, somebody else on the proxy's core."""
    doubts = []
    for number_, one in enumerate(rounds, 1):
        for case, by_name in one.items():
            for name, result in by_name.items():
                where = f"round {number_}, {case}, {name}"
                for why, count in result.failures.items():
                    doubts.append(f"{where}: {count} requests FAILED: {why}")
                if result.skipped:
                    doubts.append(f"{where}: {result.skipped} requests were not sent, all clients waited for answers")
                harness = _share(result.harness_cpu_s, result.window_s * min(2, harness_cores)) or 0.0
                if harness > HARNESS_SHARE_MAX and name != DIRECT:
                    doubts.append(f"{where}: load generator and mocks used {harness:.0%} of their core")
                foreign = _share(result.foreign_s, result.window_s) or 0.0
                if foreign > FOREIGN_SHARE_MAX:
                    doubts.append(f"{where}: others used {foreign:.0%} of the proxy's core")
    return doubts
