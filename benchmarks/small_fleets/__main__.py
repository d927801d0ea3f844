"""Small fleets at their defaults, real processes: a table of figures and their bounds, and exit status 1 for a miss.

    python -m benchmarks.small_fleets                     # all scenes, twenty minutes
    python -m benchmarks.small_fleets --sample            # three scenes for continuous integration, a minute
    python -m benchmarks.small_fleets --only slow --tree ../before

Figures are ratios within one scene, because the machine may be shared. `--tree` names the checkout of the proxy;
replicas and clients are always of this checkout. Scenes of failures run side by side. A scene that misses a bound runs
a second time alone, because other programs may have taken the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import isinf
from pathlib import Path
from time import monotonic

from benchmarks.faults import broken, killed
from benchmarks.small_fleets import failures, saturation
from benchmarks.small_fleets.stage import Check

Scene = Callable[[Path | None], Awaitable[list[Check]]]
KINDS = {"streams": True, "whole": False}
SIZES = ((4, 4), (8, 8), (64, 64), (4, 8, 32))
ALONE = ("overload", "critical", "shares")  # The scenes that run alone, because they measure throughput and waits.
SAMPLE = ("silent whole", "unauthorized", "a third of 500")


def scenes() -> dict[str, Scene]:
    """Returns every scene by its name, in the order of a run."""
    found: dict[str, Scene] = {}
    for sizes in SIZES:
        for kind, stream in KINDS.items():
            found[f"overload {'+'.join(map(str, sizes))} {kind}"] = partial(saturation.throughput, sizes, stream)
    found["critical streams"] = partial(saturation.critical, (8, 8), True)
    found["shares of two flows"] = saturation.shares
    for kind, stream in KINDS.items():
        for scene in (
            failures.slow,
            failures.silent,
            failures.frozen,
            failures.busy,
            failures.killed,
            failures.stopped,
        ):
            found[f"{scene.__name__} {kind}"] = partial(scene, stream)
    found["slow at full speed"] = partial(failures.slow, True, speed=1.0)
    found["unauthorized"] = partial(failures.refuses, "unauthorized", ["ejected", "key"])
    found["a third of 500"] = partial(failures.refuses, "error_rate", ["ejected", "answers failed"], share=1 / 3)
    found["hangs, as after SIGTERM"] = partial(failures.breaks, broken("hang", restarted=True), 3.0)
    found["drains, with /health 200"] = partial(failures.breaks, broken("draining_500", restarted=True), 3.0)
    found["flapping"] = partial(failures.breaks, killed, 0.0, times=3)
    found["streams reset"] = failures.resets
    found["deadly request"] = failures.deadly
    return found


async def run(only: list[str], tree: Path | None) -> bool:
    """Runs the scenes whose names contain a word of `only` (empty: all). Returns whether all bounds were met."""
    chosen = [name for name in scenes() if not only or any(word in name for word in only)]
    alone = [name for name in chosen if name.startswith(ALONE)]
    light = [name for name in chosen if name not in alone]
    pairs = [light[at : at + 2] for at in range(0, len(light), 2)]
    met = [await _shown(name, tree) for name in alone] + [await side_by_side(pair, tree) for pair in pairs]
    return all(met)


async def side_by_side(names: Sequence[str], tree: Path | None) -> bool:
    """Runs scenes at the same time. Returns whether each met its bounds, in this run or in a second run."""
    found = await asyncio.gather(*(_shown(name, tree) for name in names))
    return all([met or await _shown(name, tree) for name, met in zip(names, found, strict=True)])


async def _shown(name: str, tree: Path | None) -> bool:
    began_s = monotonic()
    checks = await scenes()[name](tree)
    for check in checks:
        print(f"{name:24} {check.what:46} {check.value:7.2f} {_bounds(check):>14} {'' if check.met else 'MISSED'}")
        if check.note:
            print(f"{'':24} {check.note[:200]}")
    print(f"{'':24} ({monotonic() - began_s:.0f} s)", flush=True)
    return all(check.met for check in checks)


def _bounds(check: Check) -> str:
    least = "" if isinf(check.least) else f"{check.least:g}"
    most = "" if isinf(check.most) else f"{check.most:g}"
    return f"{least} .. {most}" if least or most else "no bound"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="part of a scene's name; may be repeated")
    parser.add_argument("--sample", action="store_true", help="the scenes of continuous integration")
    parser.add_argument("--tree", type=Path, help="checkout of the proxy")
    chosen = parser.parse_args()
    tree = None if chosen.tree is None else chosen.tree.resolve()
    sys.exit(not asyncio.run(side_by_side(SAMPLE, tree) if chosen.sample else run(chosen.only, tree)))


if __name__ == "__main__":
    main()
