"""The table of `whatif`: rates of flows under other weights."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from llmproxy.tools.top.ask import AskError
from llmproxy.tools.top.document import Document, Event, Flow, Pool
from llmproxy.tools.top.whatif import weights_of, whatif
from tests.tools.top.test_picture import live


def flow(name: str, tokens_per_s: float, waiting: int = 0, band: str = "default", weight: float = 1.0) -> Flow:
    return Flow(band, name, tokens_per_s, None, None, weight, waiting, 0.0)


def event(at_s: float, name: str, backend: str | None) -> Event:
    return Event(at_s, "info", name, backend, "")


FLOWS = (
    flow("team-a", 60.0, 3),
    flow("team-b", 40.0, 3),
    flow("quiet", 10.0),
    flow("batch", 5.0, band="sheddable"),
    flow("team-a", 7.0, band="sheddable"),
)


def shared(*flows: Flow, fairness: str = "fair_share", pools: int = 1, events: tuple[Event, ...] = ()) -> Document:
    named = tuple(Pool(f"pool-{at}") for at in range(pools))
    return live(fairness=fairness, flows=flows, pools=named, now_s=1_000.0, events=events)


def lines(seen: Document, *weights: str) -> list[list[str]]:
    """The printed lines, split into cells."""
    console = Console(width=200, record=True, file=StringIO())
    console.print(whatif(seen, weights_of(weights)))
    return [re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines()]


def test_now_beside_then() -> None:
    found = lines(shared(*FLOWS), "team-a=3")
    assert found[2:8] == [
        ["flow", "band", "weight", "now", "by weight", "then", "waits"],
        ["team-a", "default", "1 -> 3", "60.0", "50.0", "75.0", "3"],
        ["team-b", "default", "1", "40.0", "50.0", "25.0", "3"],
        ["quiet", "default", "1", "10.0", "10.0", "10.0", "no"],
        ["batch", "sheddable", "1", "5.0", "5.0", "5.0", "no"],
        ["team-a", "sheddable", "1 -> 3", "7.0", "7.0", "7.0", "no"],
    ]
    text = "\n".join(" ".join(one) for one in found)
    assert "Nothing waits in sheddable" in text
    assert "Nothing waits in default" not in text
    assert "Higher bands go first" in text
    assert "pools" not in text


def said(*events: Event) -> str:
    return " ".join(" ".join(one) for one in lines(shared(*FLOWS, events=events), "team-a=3"))


@pytest.mark.parametrize(
    "name", ["backend_ejected", "backend_down", "backend_up", "backend_drained", "backend_removed"]
)
def test_a_change_of_the_fleet_within_the_minute_is_said(name: str) -> None:
    text = said(event(988.0, name, "gpu-2"), event(950.0, "backend_up", "gpu-1"))
    assert f"The fleet changed 12 s ago ({name} gpu-2)" in text
    assert "Ask again in 48 s." in text


def test_unchanged_or_old_answers_are_not_shown() -> None:
    events = (
        event(990.0, "reloaded", None),
        event(990.0, "backend_serves", "gpu-2"),
        event(939.0, "backend_up", "gpu-2"),
    )
    assert "fleet changed" not in said(*events)


def test_several_pools_are_said() -> None:
    assert "all pools as one" in str(lines(shared(*FLOWS, pools=2), "team-a=3"))


@pytest.mark.parametrize(
    ("seen", "weights", "refused"),
    [
        (
            shared(*FLOWS),
            ("team-c=3",),
            "team-c: no such flow in the last minute, which had batch, quiet, team-a, team-b",
        ),
        (shared(*(flow(f"f{at:02}", 1.0) for at in range(12))), ("x=1",), "f09 and 2 more"),
        (shared(), ("team-a=3",), "none had a request in the last minute"),
        (shared(*FLOWS, fairness="fcfs"), ("team-a=3",), "scheduling.fairness is fcfs"),
        (shared(*FLOWS), ("team-a=0",), "--weight team-a=0 should be a flow and a weight above 0"),
        (shared(*FLOWS), ("team-a=-1",), "weight above 0"),
        (shared(*FLOWS), ("team-a=inf",), "weight above 0"),
        (shared(*FLOWS), ("team-a=nan",), "weight above 0"),
        (shared(*FLOWS), ("team-a",), "weight above 0"),
        (shared(*FLOWS), ("=3",), "weight above 0"),
    ],
)
def test_questions_without_an_answer(seen: Document, weights: tuple[str, ...], refused: str) -> None:
    with pytest.raises(AskError, match=re.escape(refused)):
        whatif(seen, weights_of(weights))


def test_a_flow_name_may_have_an_equals_sign() -> None:
    assert weights_of(["tier=gold=2.5"]) == {"tier=gold": 2.5}
