"""`install.py PYTHON LOCK...` installs the packages of one or more locks and prints its progress in a few lines.

pip alone says nothing for most of a minute, or three lines for each package. What it complains of is printed as it is.
The exit code is pip's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TOLD_EACH = 15
SETTLED = ("Collecting ", "Processing ", "Ignoring ", "Requirement already satisfied")
"""How pip begins the line of a package: to be fetched, here already, not for this machine, installed."""


def install(python: str, *locks: str) -> int:
    """Install locks with this interpreter's pip, print the progress, and return the exit code."""
    total = sum(len(re.findall(r"^[\w.-]+==", Path(lock).read_text(), re.MULTILINE)) for lock in locks)
    print(f"Installing {total} packages of {' and '.join(locks)}.", flush=True)
    # A lock names every package, so pip need not look for dependencies.
    options = ["--disable-pip-version-check", "--progress-bar", "off", "--no-compile", "--require-hashes", "--no-deps"]
    for lock in locks:
        options += ["-r", lock]
    command = [python, "-u", "-m", "pip", "install", *options]
    settled = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if line.startswith(SETTLED):
                settled += 1
                if settled % TOLD_EACH == 0:
                    print(f"  {settled} of {total} packages", flush=True)
            elif line.startswith("Installing collected packages"):
                print(f"  {settled} of {total} packages, now unpacking", flush=True)
    if pip.returncode:
        print(f"pip failed with exit code {pip.returncode}; its own words are above.", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(*sys.argv[1:]))
