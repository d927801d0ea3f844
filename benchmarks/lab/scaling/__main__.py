"""Every workload under every signal, in virtual time.

    .venv/bin/python -m benchmarks.lab.scaling [--minutes 8] [--signal SIGNAL ...] [--seed N ...] [WORKLOAD ...]

Up to twelve Qwen3-32B replicas, on two H100 each, take 110 s to start and are asked for every 15 s, by every signal of
`llmproxy.lab.scaling.signals`. Runs are kept in `.cache/scaling`, so a set that was stopped goes on where it was.
Prints rows of Markdown: *attained* is the share of all requests that kept 3 s to the first token and 0.1 s per token,
by band where there are several; *replicas* are paid ones on average, starting and leaving ones included; *violated* are
seconds in which fewer than 95 % of the arrivals kept their objectives; *turns* are changes of direction within two
start-up times; *lost* are requests that were refused or failed. Means over the seeds. `oracle` knows the work that will
come, `instant` that which comes from now on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.lab.scaling.runs import kept
from benchmarks.lab.scaling.workloads import WORKLOADS
from llmproxy.lab.results.result import RunResult, ScaledResult
from llmproxy.lab.scaling.signals import SIGNALS

COLUMNS = "workload", "signal", "attained", "replicas", "of the oracle's", "violated", "peak", "turns", "lost"
FIRST = "oracle", "instant", "ours"


def row(workload: str, signal: str, results: Sequence[RunResult], oracle: Sequence[RunResult]) -> str:
    """One workload under one signal, over the seeds."""
    scaled = [_scaled(one) for one in results]
    mean = fmean(one.mean for one in scaled)
    bands = sorted({band for one in results for band in one.by_band})
    by_band = (f"{band} {fmean(one.by_band[band].goodput or 0.0 for one in results):.3f}" for band in bands)
    cells = (
        workload, signal,
        ", ".join(by_band) if len(bands) > 1 else f"{fmean(one.goodput or 0.0 for one in results):.3f}",
        f"{mean:.2f}", f"{mean / fmean(_scaled(one).mean for one in oracle):.2f}",
        f"{fmean(one.violated_s for one in scaled):.0f} s", f"{max(one.peak for one in scaled)}",
        f"{fmean(one.turns for one in scaled):.3g}", f"{fmean(one.refused + one.failed for one in results):.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _scaled(result: RunResult) -> ScaledResult:
    assert result.replicas is not None
    return result.replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--signal", action="append", choices=tuple(SIGNALS), help="only these; repeat it")
    parser.add_argument("--seed", type=int, action="append", help="repeat it; 1 unless given")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after that")
    parser.add_argument("--out", type=Path, default=Path(".cache/scaling"))
    given = parser.parse_args()
    ends_s = time.monotonic() + 60.0 * given.minutes
    signals = [*FIRST, *(name for name in given.signal or SIGNALS if name not in FIRST)]
    print(f"| {' | '.join(COLUMNS)} |\n" + "| --- " * len(COLUMNS) + "|")
    for workload in given.workloads or WORKLOADS:
        found: dict[str, list[RunResult]] = {}
        for signal in signals:
            for seed in given.seed or [1]:
                if time.monotonic() > ends_s:
                    return
                found.setdefault(signal, []).append(kept(given.out, workload, signal, seed).run)
            print(row(workload, signal, found[signal], found["oracle"]), flush=True)


if __name__ == "__main__":
    main()
