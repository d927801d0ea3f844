"""An hour of load with a fault every minute: does any request, task, timer, descriptor or byte stay behind?

    python -m benchmarks.soak --minutes 60 --out /tmp/soak

`llmproxy serve` runs as a process of its own, under 70 % of the measured capacity of its fleet. `benchmarks/endurance/`
has the parts. Ctrl-C ends the run early, with its report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from benchmarks.endurance.run import soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for soak.json")
    options = parser.parse_args()
    return 0 if uvloop.run(soak(options.minutes, options.seed, options.out)) else 1


if __name__ == "__main__":
    sys.exit(main())
