"""`python -m tests.compat [NAME ...]` runs real clients, all or those named, and says what became of each.

Exits with 1 where one of them failed. A client that this machine cannot run is skipped, which the table says.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.compat.clients import CLIENTS, Bench, Client, ClientReport, Skipped
from tests.compat.commands import CommandFailed, run
from tests.compat.environments import python_of, ready
from tests.compat.rig import Counted, rig


@dataclass(frozen=True, slots=True)
class Row:
    client: Client
    version: str = ""
    counted: Counted | None = None
    seconds: float = 0.0
    wrong: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        counted = self.counted
        statuses = "" if counted is None else ", ".join(f"{n} x {s}" for s, n in sorted(counted.statuses.items()))
        requests = "" if counted is None else str(len(counted.requests))
        tokens = "" if counted is None else str(counted.output_tokens)
        verdict = f"FAILED: {self.wrong}" if self.wrong else f"skipped: {self.skipped}" if self.skipped else "ok"
        seconds = f"{self.seconds:.1f}" if self.seconds else ""
        cells = (self.client.name, self.version, requests, statuses, tokens, seconds, verdict.partition("\n")[0])
        return f"| {' | '.join(cells)} |"


HEAD = """| client | version | requests | statuses | output tokens | s | verdict |
| --- | --- | --- | --- | --- | --- | --- |"""


async def one(client: Client) -> Row:
    """Run one client on a proxy of its own."""
    with tempfile.TemporaryDirectory(prefix="llmproxy-compat-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        try:
            environment = await ready(client.environment) if client.environment else folder
            version = await _version(client, environment)
            async with rig(folder / "log", *client.flags, breaks=client.breaks) as made:
                (work := folder / "work").mkdir()
                began_s = time.monotonic()
                try:
                    report = await client.run(Bench(made, environment, work))
                except (AssertionError, CommandFailed) as failed:
                    seconds, why = time.monotonic() - began_s, str(failed) or repr(failed)
                    return Row(client, version, await made.counted(), seconds, why)
                seconds = time.monotonic() - began_s
                counted = await made.counted()
            return Row(client, version, counted, seconds, "; ".join(_wrong(client, report, counted, seconds)))
        except Skipped as why:
            return Row(client, skipped=str(why))
        except CommandFailed as failed:
            return Row(client, wrong=str(failed))


def _wrong(client: Client, report: ClientReport, counted: Counted, seconds: float) -> list[str]:
    wrong: list[str] = []
    if set(counted.statuses) != client.statuses:
        wrong.append(f"statuses should be {sorted(client.statuses)}")
    if not counted.agrees:
        wrong.append(f"/metrics counts {counted.metrics} requests")
    if report.requests is not None and report.requests != len(counted.requests):
        wrong.append(f"it made {report.requests} requests by its own account")
    streams = [one for one in counted.requests if one["stream"] and one["path"] != "/v1/messages"]
    if client.breaks and not all(one.get("continued") for one in streams):
        wrong.append("some of its streams were not continued")
    if counted.without_usage:
        wrong.append(f"no usage of {counted.without_usage} answers")
    if report.output_tokens is not None and report.output_tokens != counted.output_tokens:
        wrong.append(f"it got {report.output_tokens} output tokens")
    if client.seconds_max is not None and seconds > client.seconds_max:
        wrong.append(f"it should take {client.seconds_max:g} s at most")
    return wrong


async def _version(client: Client, environment: Path) -> str:
    if not client.package:
        return ""
    if (environment / "node_modules").exists():
        show = f"console.log(require('{environment}/node_modules/{client.package}/package.json').version)"
        return (await run(["node", "-e", show])).strip()
    show = f"from importlib.metadata import version; print(version({client.package!r}))"
    return (await run([python_of(environment), "-c", show])).strip()


async def main() -> int:
    known = {client.name: client for client in CLIENTS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = [name for word in parser.parse_args().names for name in word.split(",") if name] or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    rows: list[Row] = []
    for name in names:
        print(f"{name}...", file=sys.stderr, flush=True)
        rows.append(await one(known[name]))
        print(rows[-1].wrong or rows[-1], file=sys.stderr, flush=True)
    print(HEAD, *rows, sep="\n")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
