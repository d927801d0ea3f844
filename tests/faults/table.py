"""The tables of docs/reference/faults.md, from the expected results of the tests: `python -m tests.faults.table`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests import ROOT
from tests.docs.reference import code, table
from tests.faults.clients import CLIENT_FAULTS
from tests.faults.misbehaviours import MISBEHAVIOURS
from tests.faults.polls import POLL_FAULTS
from tests.faults.rig import Misbehaviour
from tests.faults.scenes import SCENES

PAGE = ROOT / "docs" / "reference" / "faults.md"
CLIENT = {"other": "200, attempt 2", "own": "200, as it came", "event": "200, then one error event"}
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def outcome(fault: Misbehaviour, ask: str) -> tuple[str, str, str]:
    beside, alone = (CLIENT.get(seen, seen) for seen in (fault.client(ask, False), fault.client(ask, True)))
    verdict = fault.whole_verdict if ask == "whole" and fault.whole_verdict is not None else fault.verdict
    return beside, "the same" if alone == beside else alone, f"`{verdict}`"


def replicas() -> str:
    """One row for each outcome, with the names of all faults that have it."""
    names: dict[tuple[str, ...], list[str]] = {}
    for fault in MISBEHAVIOURS:
        stream, whole = outcome(fault, "stream"), outcome(fault, "whole")
        kinds = {stream: ""} if stream == whole else {stream: " (stream)", whole: " (one piece)"}
        for found, kind in kinds.items():
            names.setdefault(found, []).append(fault.name + kind)
    rows = ((*found, "; ".join(faults)) for found, faults in names.items())
    return table(("client saw, beside another", "client saw, alone", "verdict", "a replica that…"), rows)


def clients() -> str:
    rows = ((one.name, one.saw, str(one.cut or "none"), code(one.outcomes)) for one in CLIENT_FAULTS)
    return table(("a client that…", "saw", "connections to the replica that are cut", "outcome in the log"), rows)


def polls() -> str:
    def rows() -> Iterator[tuple[str, str, str, str]]:
        for fault in POLL_FAULTS:
            event = "backend_metrics_unreadable" if fault.unread else "" if fault.up else "backend_down"
            load = "unknown" if fault.running is None else f"{fault.running} running"
            yield fault.name, "yes" if fault.up else "no", load, f"`{event}`" if event else "nothing"

    return table(("a replica that…", "available", "known load", "warning in the log"), rows())


def fleets() -> str:
    rows = ((scene.name, scene.clients, scene.replicas) for scene in SCENES)
    return table(("when…", "clients saw", "replicas saw"), rows)


PARTS = {"replicas": replicas, "clients": clients, "polls": polls, "fleets": fleets}


def generated(text: str) -> str:
    """Returns the text of the page with new tables."""
    return PART.sub(lambda part: part[1] + PARTS[part[2]]() + "\n" + part[3], text)


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))
