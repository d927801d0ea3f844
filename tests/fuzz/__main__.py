"""`make fuzz`: rounds of all fuzz tests, each with a seed of its own, until the time is over or something is found."""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time

ROUND_EXAMPLES = 2_000
"""Of each test, so that a round takes about a minute and the seed of a finding is soon printed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0, help="No round begins after this.")
    parser.add_argument("--seed", type=int, help="Of the first round, to repeat it.")
    args = parser.parse_args()
    until_s, seed, rounds = time.monotonic() + 60.0 * args.minutes, args.seed, 0
    environment = {"LLMPROXY_FUZZ_EXAMPLES": str(ROUND_EXAMPLES)} | os.environ
    while time.monotonic() < until_s:
        seed = secrets.randbits(32) if seed is None else seed
        examples = environment["LLMPROXY_FUZZ_EXAMPLES"]
        print(f"round {rounds + 1}: seed {seed}, up to {examples} examples of each test", flush=True)
        # The time limit of ordinary tests finds hung tests; these tests take long on purpose.
        options = ["-m", "pytest", "tests/fuzz", "-n", "auto", "--timeout=1800", f"--hypothesis-seed={seed}"]
        if code := subprocess.run([sys.executable, *options], env=environment, check=False).returncode:
            return code
        seed, rounds = None, rounds + 1
    print(f"rounds: {rounds}; nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
