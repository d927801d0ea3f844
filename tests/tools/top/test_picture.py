"""The pictures of `top` and `explain`, drawn from documents."""

from __future__ import annotations

import io
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console, RenderableType

from llmproxy.tools.top.ask import AskError, ProxyAddress
from llmproxy.tools.top.document import ClusterSeen, Document, Event, read
from llmproxy.tools.top.picture import HELP, duration, picture
from llmproxy.tools.top.story import story
from llmproxy.tools.top.view import COLUMNS, KEYS, View

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31mred",
    "a\r\nb",
    "语" * 200,
    "n" * 10_000,
    "\u202eltr",
    "[bold]x[/]",
    "\udcff",
)


def found(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(__file__).parent / name).read_text())
    return content


def live(**changes: Any) -> Document:
    return replace(read(found("live.json"), Document), **changes)


def drawn(shown: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None, highlight=False)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_picture_shows_the_current_state() -> None:
    lines = drawn(picture(live(), View(), 200), 200)
    text = "\n".join(lines)
    assert "7.5 requests/s" in lines[0]
    assert lines[2].startswith("sim-8b: 11 sheddable requests wait, up to 2.5 s")
    assert "in 23 s: 172 completed, 61 refused, 11 preempted" in text
    (band,) = (line for line in lines if line.startswith("sheddable"))
    assert band.split()[1:4] == ["11", "2.5", "s"]
    assert band.rstrip().endswith("the room left is kept for higher bands")
    (replica,) = (line for line in lines if line.startswith("replica-1"))
    assert replica.split()[1:] == ["up", "3/4", "0%", "93%", "297", "1.00x", "sim-8b"]
    (flow,) = (line for line in lines if line.startswith("globex"))
    assert flow.split()[1:5] == ["default", "43%", "50%", "280"]
    assert any("backend_up" in line for line in lines)


@pytest.mark.parametrize(("leader", "words"), [("m1", "m1 leads 2 members"), (None, "nobody leads 2 members")])
def test_picture_names_the_leader_of_a_cluster(leader: str | None, words: str) -> None:
    seen = live(cluster=ClusterSeen(leader, ("m0", "m1")))
    assert drawn(picture(seen, View(), 80))[1].rstrip().endswith(f"; {words}")
    assert "leads" not in "\n".join(drawn(picture(live(), View(), 80)))


def test_roles_are_shown_where_there_are_any() -> None:
    base = live()
    assert "role" not in "\n".join(drawn(picture(base, View(), 80)))
    first, second = base.backends[:2]
    apart = live(backends=(replace(first, role="prefill"), replace(second, role="both")))
    lines = drawn(picture(apart, View(), 80))
    (titles,) = (line.split() for line in lines if line.startswith("replica ▲"))
    rows = [line.split()[1:3] for line in lines if line.startswith("replica-")]
    assert (titles[2:4], rows) == (["role", "state"], [["prefill", "up"], ["both", "up"]])


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [(80, 24), (40, 10), (20, 4), (200, 60)])
def test_names_cannot_control_the_terminal(name: str, size: tuple[int, int]) -> None:
    base = live()
    hostile = live(
        version=name,
        summary=replace(base.summary, text=name, level=name),
        bands=tuple(replace(one, band=name, reasons=(name,)) for one in base.bands),
        backends=tuple(replace(one, backend=name, why=name, state=name, pool=name) for one in base.backends),
        flows=tuple(replace(one, flow=name, band=name) for one in base.flows),
        events=tuple(replace(one, event=name, text=name, level=name) for one in base.events),
    )
    lines = drawn(picture(hostile, View(filter=""), *size), size[0])
    assert len(lines) <= size[1]
    assert all(cell_len(line) <= size[0] for line in lines)
    assert all(character.isprintable() for line in lines for character in line)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("height", range(6, 60, 3))
def test_picture_fits_and_counts_the_rest(height: int) -> None:
    one = live().backends[0]
    lines = drawn(
        picture(live(backends=tuple(replace(one, backend=f"gpu-{n}") for n in range(300))), View(), 80, height)
    )
    assert len(lines) <= height
    assert lines[-1].startswith("q quit")
    shown = sum(line.startswith("gpu-") for line in lines)
    assert shown == 0 or f"{300 - shown} more" in [line.strip() for line in lines]


def test_rows_that_the_proxy_did_not_send_are_counted() -> None:
    lines = drawn(picture(live(more_backends=7), View(), 80, 60))
    assert (len(lines), [line.strip() for line in lines].count("7 more")) == (60, 1)


def test_80_columns_have_room_for_the_reason() -> None:
    assert any(line.endswith("the room left is kept for higher bands") for line in drawn(picture(live(), View(), 80)))


def order(view: View) -> list[str]:
    one = live().backends[0]
    backends = (
        replace(one, backend="b", load=1, state="up", kv_used=None),
        replace(one, backend="c", load=3, state="up", kv_used=0.1),
        replace(one, backend="a", load=2, state="down", kv_used=0.2),
    )
    return [shown.backend for shown in view.ordered(backends)]


def test_keys_sort_reverse_and_filter() -> None:
    view = View()
    assert order(view) == ["a", "b", "c"]
    view.press("s")
    assert (view.column, order(view)) == ("state", ["a", "b", "c"])
    view.press("s")
    assert (view.column, order(view)) == ("load", ["c", "a", "b"])
    view.press("r")
    assert order(view) == ["b", "a", "c"]
    view.press("s")
    assert (view.column, order(view)) == ("KV", ["a", "c", "b"])
    for _ in range(len(COLUMNS) - 3):
        view.press("s")
    assert view.column == "replica"
    for key in "/Bq\x7f\n":
        view.press(key)
    assert (order(view), view.quit) == (["b"], False)
    for key in "/\x1bpq":
        view.press(key)
    assert (view.filter, view.paused, view.quit) == ("", True, True)
    view = View()
    for key in "/b\n?p":
        view.press(key)
    assert (view.help, view.paused, view.filter) == (False, False, "b")
    view.press("\x1b")
    assert view.filter == ""


def test_help_tells_every_key_in_80_columns() -> None:
    text = "\n".join(drawn(picture(live(), View(help=True), 80, 24)))
    assert all(f"{key}          {does}" in text for key, (_, does) in KEYS.items())
    assert all(meaning in text for meaning in HELP.values())


def test_a_filter_narrows_all_but_bands() -> None:
    text = "\n".join(drawn(picture(live(), View(filter="replica-3"), 80)))
    assert "sheddable" in text
    assert "backend_up backend=replica-3" in text
    assert "replica-1" not in text
    assert "globex" not in text


def test_an_event_has_its_time_of_day_and_an_older_one_its_date() -> None:
    now = datetime(2026, 3, 2, 14, 3, 20).timestamp()
    events = [Event(990.0, "info", "today", None, ""), Event(1_000.0 - 86_400.0, "info", "before", None, "")]
    lines = drawn(picture(live(unix_s=now, now_s=1_000.0, events=tuple(events)), View(), 80))
    assert [line.split()[:3] for line in lines[-2:]] == [["14:03:10", "today"], ["03-01", "14:03", "before"]]


def test_a_replica_that_is_not_up_has_no_pace() -> None:
    lines = drawn(
        picture(live(backends=(replace(live().backends[0], state="ejected", tokens_slower=2.5),)), View(), 80)
    )
    assert "2.50x" not in "\n".join(lines)


def test_a_slow_replica_has_a_mark_and_refusals_have_their_outcome() -> None:
    slow = replace(live().backends[0], state="up", tokens_slower=2.5)
    refused = replace(live().minute, outcomes={"expired": 2, "rejected_capacity": 59})
    lines = "\n".join(drawn(picture(live(backends=(slow,), minute=refused), View(), 120), 120))
    assert "!2.50x" in lines
    assert "59 rejected_capacity, 2 expired" in lines
    small = drawn(picture(live(minute=refused), View(), 80, 24))
    assert "59 rejected_capacity, 2 expired" in " ".join(line.strip() for line in small)
    assert len(small) == 24
    assert max(map(cell_len, small)) <= 80


def test_another_document_is_refused() -> None:
    with pytest.raises(AskError, match="version"):
        read({"version": "9"}, Document)
    with pytest.raises(AskError, match="version"):
        story({"request": "a"})


def test_the_story_of_a_request_has_its_times_and_prices() -> None:
    text = "\n".join(drawn(story(found("story.json"))))
    assert "0.043 s  first byte, 43 ms after the grant; predicted 38 ms" in text
    assert "completed (200) after 0.225 s" in text
    assert "→ replica-1: 0.095 s = queue 0.017 + prefill 0.021 + stream 0.019 + harm" in text


def test_both_stages_of_a_split_request_are_told() -> None:
    split = found("story.json")
    first = split["attempts"][0]
    split["attempts"] = [first | {"stage": "prefill"}, first | {"stage": "decode", "backend": "replica-2"}]
    lines = drawn(story(split))
    assert "1. prefill on replica-1" in lines
    assert "2. decode on replica-2" in lines


def test_a_request_that_waits_has_a_story() -> None:
    waits = {
        "band": "default", "flow": "\x1b[2Jacme", "ahead_in_higher_bands": 3, "ahead_in_flow": 2, "waited_s": 1.5,
        "left_s": 58.5, "waited_for": "no backend has room", "went_first": [["critical", "c", 2]],
    }  # fmt: skip
    nothing: dict[str, Any] = {
        "request": "r", "waits": waits, "ended": None, "attempts": [], "waited": None, "choices": [],
    }  # fmt: skip
    text = " ".join(drawn(story(nothing), 200))
    assert "waits for 1.5 s in band default, flow �[2Jacme: 3 ahead in higher bands, 2 in its flow" in text
    assert "waited: no backend has room; before it went 2 of c (critical)" in text


def test_a_probe_is_called_one() -> None:
    probe = found("story.json")
    assert "probe" not in "\n".join(drawn(story(probe), 200))
    probe["attempts"][0]["why"]["probe"] = True
    assert "is granted as a probe, because its replica was ejected, while" in "\n".join(drawn(story(probe), 200))


def test_an_attempt_after_a_broken_stream_generates_the_rest() -> None:
    broken = found("story.json")
    first = broken["attempts"][0] | {"committed": True}
    broken["attempts"] = [first, first | {"backend": "gpu-7"}]
    broken["ended"] |= {"continued": "text", "not_continued": "the retry budget is used up"}
    text = "\n".join(drawn(story(broken), 300))
    assert f"attempt 1 on {first['backend']}\n" in text.replace(" \n", "\n")
    assert "attempt 2 on gpu-7, for the rest of the answer" in text
    assert "; continued (text); not continued: the retry budget is used up" in text


def test_a_request_that_got_no_backend_has_the_reason_of_its_wait() -> None:
    late = found("story.json")
    late["attempts"] = []
    late["waited"] = {"queued_s": 0.25, "waited_for": "no backend has room", "went_first": [["default", "", 3]]}
    lines = [line.strip() for line in drawn(story(late), 200)]
    at = lines.index("0.250 s  begins to wait")
    assert lines[at + 1] == "waited: no backend has room; before it went 3 of no name (default)"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"), (0.0, "0 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (99.94, "99.9 s"), (100.0, "2 min"),
        (5969.0, "99 min"), (6000.0, "2 h"), (1e6, "12 d"),
    ],
)  # fmt: skip
def test_durations_are_short(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", ""])
def test_no_address(url: str) -> None:
    with pytest.raises(AskError, match="no address"):
        ProxyAddress.parsed(url, None)


def test_the_scheme_may_be_left_out() -> None:
    assert str(ProxyAddress.parsed("gpu:8080", None)) == "http://gpu:8080"
