"""Look up the locked packages in an advisory database, and tell an unreachable database from a clean result.

    python .ci/audit.py PIP_AUDIT LOCK...

0: no known vulnerability, or nobody could be asked, which is said; 1: vulnerabilities, one a line; 2: pip-audit failed
otherwise. pip-audit alone calls a lock clean whose packages a mirror without advisories does not know, and fails where
there is no network.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

ALL_MAX_S = 120
ONE_MAX_S = 5
UNREACHABLE = ("requests.exceptions", "urllib3.exceptions", "Could not connect", "ConnectionError", "timed out")


def audit(program: str, locks: Sequence[str]) -> int:
    """Run pip-audit on locks, print what it found, and return the exit code."""
    command = [program, "--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command += ["--timeout", str(ONE_MAX_S), *(word for lock in locks for word in ("--requirement", lock))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ALL_MAX_S, check=False)
    except FileNotFoundError:
        return skipped(f"{program} is not installed")
    except subprocess.TimeoutExpired:
        return skipped(f"no answer within {ALL_MAX_S} s")
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode} without a word"]
        if any(sign in done.stderr for sign in UNREACHABLE):
            return skipped(lines[-1][:200])
        print(f"pip-audit failed: {lines[-1]}", file=sys.stderr)
        return 2
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return skipped("who answered knows none of the packages")
    found = [(package, flaw) for package in packages for flaw in package.get("vulns", [])]
    for package, flaw in found:
        fixed = ", ".join(flaw.get("fix_versions", [])) or "no version yet"
        print(f"{package['name']} {package['version']}: {flaw['id']}, fixed in {fixed}")
    if unknown:
        print(f"not in the database: {', '.join(unknown)}")
    print(f"{len(packages) - len(unknown)} packages looked up, {len(found)} vulnerabilities")
    return int(bool(found))


def skipped(why: str) -> int:
    print(f"skipped: advisory database not reachable ({why})")
    return 0


if __name__ == "__main__":
    raise SystemExit(audit(sys.argv[1], sys.argv[2:]))
