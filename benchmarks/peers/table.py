"""The figures of each case, and their tables: medians, spreads, and ratios within each round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.cases import Case
from benchmarks.peers.measure import DISTURBED_SHARE, Spread, Window
from benchmarks.table import line

DIRECT = "direct"
HARNESS_SHARE_MAX = 0.9
Round = Mapping[str, Window]
"""The windows of one case in one round, by competitor."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of a table."""

    name: str
    of: Callable[[Window], float | None]
    added: bool = False
    """Whether the figure of direct access in the same round is subtracted."""
    ratio: bool = False
    """Whether the ratios to other proxies are shown too."""


def _per(count: Callable[[Window], int]) -> Callable[[Window], float | None]:
    return lambda window: None if window.cpu_s is None or not count(window) else window.cpu_s * 1e6 / count(window)


def _p50(of: Callable[[Window], Spread | None]) -> Callable[[Window], float | None]:
    return lambda window: spread.p50_us if (spread := of(window)) else None


def _p99(of: Callable[[Window], Spread | None]) -> Callable[[Window], float | None]:
    return lambda window: spread.p99_us if (spread := of(window)) else None


def _core_use(window: Window) -> float | None:
    return None if window.cpu_s is None else 100 * window.cpu_s / window.window_s


def _rss_per_stream_kb(window: Window) -> float | None:
    if window.rss_bytes is None or window.rss_before_bytes is None or not window.streams:
        return None
    return (window.rss_bytes - window.rss_before_bytes) / window.streams / 1e3


CPU_PER_REQUEST = Figure("CPU/request, µs", _per(lambda window: window.requests), ratio=True)
CPU_PER_CHUNK = Figure("CPU/chunk, µs", _per(lambda window: window.chunks), ratio=True)
REQUESTS_PER_S = Figure("requests/s", lambda window: window.requests / window.window_s)
CHUNKS_PER_S = Figure("chunks/s", lambda window: window.chunks / window.window_s)
CORE_USE = Figure("core use, %", _core_use)
RSS = Figure("RSS, MB", lambda window: None if window.rss_bytes is None else window.rss_bytes / 1e6)
RSS_PEAK = Figure("peak RSS, MB", lambda window: None if window.rss_peak_bytes is None else window.rss_peak_bytes / 1e6)
RSS_PER_STREAM = Figure("RSS/stream, kB", _rss_per_stream_kb)
LATENCY = (
    Figure("added p50, µs", _p50(lambda window: window.latency), added=True, ratio=True),
    Figure("added p99, µs", _p99(lambda window: window.latency), added=True),
)
STREAM = (
    Figure("added TTFT p50, µs", _p50(lambda window: window.ttft), added=True, ratio=True),
    Figure("p99", _p99(lambda window: window.ttft), added=True),
    Figure("added transit p50, µs", _p50(lambda window: window.transit), added=True, ratio=True),
    Figure("p99", _p99(lambda window: window.transit), added=True),
)


def figures(case: Case) -> tuple[Figure, ...]:
    """Returns the columns of a case."""
    cost, throughput, times = (
        (CPU_PER_CHUNK, CHUNKS_PER_S, STREAM) if case.chunks else (CPU_PER_REQUEST, REQUESTS_PER_S, LATENCY)
    )
    memory = (RSS,) if not case.fresh else (RSS, RSS_PER_STREAM) if case.chunks else (RSS_PEAK,)
    return (cost, replace(throughput, ratio=case.saturating), *times, CORE_USE, *memory)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def kept(rounds: Sequence[Round]) -> list[Round]:
    """Returns the rounds without disturbed windows. A proxy that has only disturbed windows keeps them."""
    clean = [
        {name: window for name, window in one.items() if window.disturbed_share <= DISTURBED_SHARE} for one in rounds
    ]
    left = {name for one in clean for name in one}
    return [{**{name: window for name, window in one.items() if name not in left}, **good}
            for one, good in zip(rounds, clean, strict=True)]  # fmt: skip


def value(figure: Figure, one: Round, name: str) -> float | None:
    """Returns a figure of a proxy in a round; None if the round does not have it.

    If `figure.added`, the figure of direct access is subtracted, except for direct access itself.
    """
    if name not in one:
        return None
    own = figure.of(one[name])
    if not figure.added or own is None or name == DIRECT:
        return own
    direct = figure.of(one[DIRECT]) if DIRECT in one else None
    return None if direct is None else own - direct


def values(figure: Figure, rounds: Iterable[Round], name: str) -> list[float]:
    """Returns a figure of a proxy in every round that has this figure."""
    return [known for one in rounds if (known := value(figure, one, name)) is not None]


def ratios(figure: Figure, rounds: Iterable[Round], name: str, base: str) -> list[float]:
    """Returns the figure of `name` divided by the figure of `base`, in each round that has both."""
    pairs = ((value(figure, one, name), value(figure, one, base)) for one in rounds)
    return [own / other for own, other in pairs if own is not None and other is not None and other > 0]


def number(amount: float) -> str:
    if abs(amount) >= 100:
        return f"{amount:,.0f}"
    return f"{amount:.1f}" if abs(amount) >= 10 else f"{amount:.2f}"


def cell(amounts: Sequence[float]) -> str:
    """Returns the median and the spread over the rounds as text; a dash without figures."""
    if not amounts:
        return "–"
    median = number(statistics.median(amounts))
    return median if len(amounts) == 1 else f"{median} [{number(min(amounts))}..{number(max(amounts))}]"


# --- tables -----------------------------------------------------------------------------------------------------------


def render(case: Case, rounds: Sequence[Round], bases: Sequence[str]) -> str:
    """Returns the Markdown tables of a case: the figures of each proxy, and the ratios to each of `bases`."""
    names = list(dict.fromkeys(name for one in rounds for name in one))
    usable = kept(rounds)
    columns = figures(case)
    against = [(figure, base) for figure in columns if figure.ratio for base in bases if base in names]
    head = ["proxy", *(figure.name for figure in columns), "windows"]
    rows = [head, ["---", *("--:" for _ in head[1:])]]
    for name in names:
        clean = sum(name in one for one in usable)
        disturbed = sum(one[name].disturbed_share > DISTURBED_SHARE for one in usable if name in one)
        cells = [cell(values(figure, usable, name)) for figure in columns]
        rows.append([name, *cells, f"{clean}{' disturbed' if disturbed else ''}"])
    text = f"### {case.name}: {case.title}\n\n" + "\n".join(map(line, rows))
    if against:
        head = ["proxy", *(f"{figure.name.partition(',')[0]} ÷ {base}" for figure, base in against)]
        rows = [head, ["---", *("--:" for _ in head[1:])]]
        for name in names:
            if name != DIRECT:
                cells_against = (
                    "1" if name == base else cell(ratios(figure, usable, name, base)) for figure, base in against
                )
                rows.append([name, *cells_against])
        text += "\n\n" + "\n".join(map(line, rows))
    return text


def doubts(case: Case, rounds: Sequence[Round]) -> list[str]:
    """Returns reasons to doubt a figure: failed requests, disturbed windows, a busy load generator."""
    found = []
    for number_, one in enumerate(rounds, 1):
        for name, window in one.items():
            where = f"{case.name}, round {number_}, {name}"
            found += [f"{where}: {count} FAILED: {why}" for why, count in window.failures.items()]
            if window.skipped:
                found.append(f"{where}: {window.skipped} requests were not sent, because all clients waited")
            if window.disturbed_share > DISTURBED_SHARE:
                found.append(f"{where}: others had {window.disturbed_share:.0%} of the proxy's core")
            if (window.harness_foreign_s or 0.0) > DISTURBED_SHARE * window.window_s:
                share = (window.harness_foreign_s or 0.0) / window.window_s
                found.append(f"{where}: others had {share:.0%} of a core of the load generator, so its times are late")
            if name != DIRECT and window.harness_cpu_s > HARNESS_SHARE_MAX * window.window_s:
                share = window.harness_cpu_s / window.window_s
                found.append(f"{where}: load generator and mocks used {share:.0%} of a core")
    return found
