"""Small fleets at their defaults, real processes: a table of figures and their bounds, and exit status 1 for a miss.

    python -m benchmarks.small_fleets                     # all scenes, a quarter of an hour
    python -m benchmarks.small_fleets --sample            # the four that continuous integration runs, a minute
    python -m benchmarks.small_fleets --only slow --tree ../before

Figures are ratios of what is measured within one scene, because the machine may be shared. `--tree` names the checkout
whose proxy is judged; replicas and clients are always those of this one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from math import isinf
from pathlib import Path
from time import monotonic

from benchmarks.small_fleets import failures, saturation
from benchmarks.small_fleets.stage import Check

Scene = Callable[[Path | None], Awaitable[list[Check]]]
KINDS = {"streams": True, "whole": False}
SIZES = ((4, 4), (8, 8), (64, 64), (4, 8, 32))
SAMPLE = ("overload 8+8 whole", "silent streams", "unauthorized", "a third of 500")


def scenes() -> dict[str, Scene]:
    """Every scene by its name, in the order of a run."""
    found: dict[str, Scene] = {}
    for sizes in SIZES:
        for kind, stream in KINDS.items():
            found[f"overload {'+'.join(map(str, sizes))} {kind}"] = partial(saturation.throughput, sizes, stream)
    found["critical streams"] = partial(saturation.critical, (8, 8), True)
    for kind, stream in KINDS.items():
        for scene in (failures.slow, failures.silent, failures.busy, failures.killed, failures.stopped):
            found[f"{scene.__name__} {kind}"] = partial(scene, stream)
    found["slow at full speed"] = partial(failures.slow, True, speed=1.0)
    found["unauthorized"] = partial(failures.refuses, "unauthorized", ["401"])
    found["a third of 500"] = partial(failures.refuses, "error_rate", ["500"], share=1 / 3)
    found["deadly request"] = failures.deadly
    return found


async def run(only: list[str], tree: Path | None) -> bool:
    """Run the scenes whose names contain one of `only` (all if empty); whether each figure is within its bounds."""
    well = True
    for name, scene in scenes().items():
        if only and not any(word in name for word in only):
            continue
        began_s = monotonic()
        for check in await scene(tree):
            well = well and check.well
            print(f"{name:24} {check.what:46} {check.value:7.2f} {_bounds(check):>14} {'' if check.well else 'MISSED'}")
            if check.note:
                print(f"{'':24} {check.note[:200]}")
        print(f"{'':24} ({monotonic() - began_s:.0f} s)", flush=True)
    return well


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
    sys.exit(not asyncio.run(run([*chosen.only, *(SAMPLE if chosen.sample else ())], tree)))


if __name__ == "__main__":
    main()
