"""Plays every misbehaviour and writes the observations to the tables of docs/reference/faults.md.

Run `python -m tests.faults.table`; it takes about nine minutes. With `--print` the page goes to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from llmproxy.core.domain import Stage
from tests import ROOT
from tests.e2e.leftovers import CountingLoop
from tests.faults.clients import CLIENT_FAULTS, Observed, observe
from tests.faults.misbehaviours import MISBEHAVIOURS
from tests.faults.polls import POLL_FAULTS, watch
from tests.faults.rig import Received, Seen, play
from tests.faults.scenes import SCENES, perform

PAGE = ROOT / "docs" / "reference" / "faults.md"
TEXT_MAX = 110
STAGES = """\
In these runs, the faulty replica has one stage of a [split request](../how-to/disaggregation.md), and the other
replicas are healthy. With a faulty prefill replica, clients always got 200. *Mode* is the label in
`llmproxy_disaggregation_total`."""
FLEETS = """\
These fleets have two replicas unless the row says otherwise. Each request has a line in the log, and the table counts
these lines by outcome."""


def client_saw(received: Received, seen: Seen) -> str:
    if seen.client == "other":
        return f"200, attempt {received.headers['x-llmproxy-attempts']}"
    if seen.client == "own":
        return "200, as it came"
    if seen.client == "event":
        return f"200, then one error event: “{_message(received.events[-1].removeprefix(b'data: '))}”"
    if seen.client == "cut":
        return f"{received.status}, then the connection is cut"
    retry = f", Retry-After {received.headers['retry-after']}" if "retry-after" in received.headers else ""
    return f"{received.status} “{_message(received.body)}”{retry}"


def backend_saw(seen: Seen) -> str:
    return f"{seen.requests}, cut" if seen.cut else str(seen.requests)


def joined(rows: Sequence[tuple[str, tuple[str, ...]]], rest: str = "") -> Iterator[str]:
    """One line for each outcome, with the names of all faults that have it, or `rest` in place of the longest list."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, outcome in rows:
        names.setdefault(outcome, []).append(name)
    longest = max(names.values(), key=len)
    for outcome, faults in names.items():
        listed = rest if rest and faults is longest else _cell("; ".join(faults))
        yield "| " + " | ".join((*outcome, listed)) + " |"


def log_line(line: Mapping[str, Any]) -> str:
    error = f": {_short(str(line['error']))}" if "error" in line else ""
    return f"{line['log_level']} `{line['outcome']}`{error}"


def _message(body: bytes) -> str:
    try:
        return _short(str(json.loads(body)["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return _short(body.decode("utf-8", "replace"))


def _short(text: str) -> str:
    text = re.sub(r"'127\.0\.0\.1', \d+", "HOST", " ".join(text.split()))
    text = re.sub(r"127\.0\.0\.1(:\d+)?", "HOST", text)
    return _cell(text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


async def page() -> str:
    """The whole page: the words that it begins with, and the tables."""
    lines = [PAGE.read_text().partition("## Replicas")[0] + "## Replicas", ""]
    columns = ("client saw, beside another", "client saw, alone", "requests", "verdict",
               "log (alone)", "a replica that…")  # fmt: skip
    lines += ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    replicas: list[tuple[str, tuple[str, ...]]] = []
    for fault in MISBEHAVIOURS:
        rows: list[tuple[str, ...]] = []
        for ask in ("stream", "whole"):
            beside, alone = await play(fault, ask), await play(fault, ask, alone=True)
            saw = client_saw(beside.received, beside), client_saw(alone.received, alone)
            rows.append((
                saw[0], "the same" if saw[0] == saw[1] else saw[1], backend_saw(beside), " ".join(beside.verdicts),
                f"{alone.exit['log_level']} `{alone.exit['outcome']}`",
            ))  # fmt: skip
        kinds = [""] if rows[0] == rows[1] else [" (stream)", " (one piece)"]
        replicas += [(fault.name + kind, row) for kind, row in zip(kinds, rows, strict=False)]
    lines += [*joined(replicas), "", "## Stages", "", STAGES, ""]
    lines += [
        "| mode, faulty prefill | client saw, faulty decode | mode, faulty decode | a replica that… |",
        "| --- " * 4 + "|",
    ]
    stages: list[tuple[str, tuple[str, ...]]] = []
    for fault in MISBEHAVIOURS:
        first = await play(fault, "whole", stage=Stage.PREFILL)
        second = await play(fault, "stream", stage=Stage.DECODE)
        hows = [f"`{seen.exit['disaggregation']}`" for seen in (first, second)]
        stages.append((fault.name, (hows[0], client_saw(second.received, second), hows[1])))
    lines += joined(stages, "has any other fault of the first table")
    lines += [
        "",
        "## Clients",
        "",
        "| a client that… | saw | the replica saw | log said |",
        "| --- | --- | --- | --- |",
    ]
    for client in CLIENT_FAULTS:
        lines.append("| " + " | ".join((_cell(client.name), *client_row(await observe(client)))) + " |")
    lines += ["", "## Polls", "", "There is one replica. A good poll makes it available again.", ""]
    lines += ["| a replica that… | client saw | available | known load | log said |", "| --- " * 5 + "|"]
    lines += ["| " + " | ".join(row) + " |" async for row in poll_rows()]
    lines += [
        "",
        "## Fleets",
        "",
        FLEETS,
        "",
    ]
    lines += ["| when… | clients saw | replicas saw | log said |", "| --- " * 4 + "|"]
    lines += ["| " + " | ".join(row) + " |" async for row in scene_rows()]
    return "\n".join(lines) + "\n"


async def scene_rows() -> AsyncIterator[tuple[str, ...]]:
    for scene in SCENES:
        played = await perform(scene)
        counts = [*sorted(played.events.items()), *sorted(played.outcomes.items())]
        log = ", ".join(f"{count} times `{what}`" if count > 1 else f"`{what}`" for what, count in counts)
        yield _cell(scene.name), played.clients, scene.replicas, log


async def poll_rows() -> AsyncIterator[tuple[str, ...]]:
    for fault in POLL_FAULTS:
        seen = await watch(fault)
        load = "nothing" if seen.running is None else f"{seen.running} running"
        warnings = "; ".join(f"warning `{line['event']}`: {_short(str(line['why']))}" for line in seen.log) or "nothing"
        yield _cell(fault.name), str(seen.status), "yes" if seen.up else "no", load, warnings


def client_row(seen: Observed) -> tuple[str, str, str]:
    times = {0: "nothing", 1: "one request"}.get(seen.asked, f"{seen.asked} requests")
    cut = {0: "", 1: "; its connection is cut"}.get(seen.cut, f"; {seen.cut} connections are cut")
    lines = [log_line(line) for line in seen.log if line["event"] == "request"]
    texts = [f"{lines.count(line)} times {line}" if lines.count(line) > 1 else line for line in dict.fromkeys(lines)]
    return seen.client, times + cut, "; ".join(texts) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="write to standard output instead of the file")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        text = runner.run(page())
    if options.print:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
