"""Draws the screen of `llmproxy top`: functions from the document to renderables of rich, without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmproxy.observe.live.summary import SLOWER
from llmproxy.tools.terminal import printable
from llmproxy.tools.top.document import Backend, Band, Document, Event, Flow
from llmproxy.tools.top.view import COLUMNS, KEYS, View

LEVEL_STYLES = {"ok": "green", "info": "", "warning": "yellow", "bad": "red", "error": "red"}
STATE_STYLES = {"up": "green", "down": "red"}
EVENTS_MAX = 8
SUMMARY_LINES_MAX = 3
ENDED_LINES_MAX = 2
FIRST_COLUMN = 10  # The minimum width of the first column, so that the columns of all sections align.
LINES_MIN = 2  # The minimum number of lines of a section below its titles: one row, and the number of further rows.
ROOMY = 30  # The minimum height of the screen for blank lines between sections.
PLAIN, WIDE = 60, 110
"""The minimum widths of the screen for further columns."""
HELP = {
    "waiting": "requests in the queue of the proxy; oldest: how long the first waits",
    "TTFT": "time to first token in the last minute, median and 99th percentile",
    "load": "requests sent there, and how many the engine runs at once",
    "role": "prefill, decode or external, if it is not an engine for both",
    "KV, hit": "share of the KV cache in use; share of prompt tokens that it had",
    "pace": "time for the same work, in multiples of the pool's; ! from 1.5x",
    "share, due": "its part of the band's tokens in the last minute; its part by weight",
}
"""Column title -> meaning, for the help."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a section.

    Its width is at most a fifth of the section; the last column gets the rest. `words` columns are aligned to the left.
    """

    title: str
    words: bool = False
    least: int = 0  # The minimum width of a terminal that shows this column.


@dataclass(frozen=True, slots=True)
class Section:
    """A table. A small terminal does not show all of its rows."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    more: int = 0  # The number of rows that the proxy did not send.

    @property
    def wanted(self) -> int:
        """The number of lines below the titles if all rows are shown."""
        return len(self.rows) + (self.more > 0)


def picture(
    document: Document,
    view: View,
    width: int,
    height: int | None = None,
    *,
    trouble: str = "",
    more: Section | None = None,
    foot: Sequence[Text] | None = None,
) -> RenderableType:
    """Returns the screen for a document.

    The screen has `width` columns and at most `height` lines; without a height, all lines. `trouble` is a warning that
    the document is old. The section `more` follows the replicas, and `foot` follows all sections. Without `foot`, the
    last line of the screen shows the keys.
    """
    head = _head(document, view, width, height, trouble)
    if view.help:
        sections = _help()
    else:
        sections = [
            _bands(document.bands), _replicas(document, view), *([more] if more is not None else ()),
            _flows(document.flows, view), _events(document, view),
        ]  # fmt: skip
    sections = [one for one in sections if one.wanted]
    above = 2 if height is None or height >= ROOMY else 1
    below = foot if foot is not None else [_foot(view)] if height is not None else []
    room = None if height is None else height - len(head) - len(below) - above * len(sections)
    while room is not None and sections and room < sum(min(LINES_MIN, one.wanted) for one in sections):
        sections.pop()
        room += above
    counts = _shares([one.wanted for one in sections], room)
    lines: list[RenderableType] = [*head]
    for section, count in zip(sections, counts, strict=True):
        lines += [Text()] * (above - 1) + [_table(section, count, width)]
    if room is not None and foot is None:
        lines += [Text()] * (room - sum(counts))
    return Group(*lines, *below)


def _shares(wanted: Sequence[int], room: int | None) -> list[int]:
    """Returns the number of rows for each section, from the number that each wants.

    Sections get one row each in turn, until all have the rows that they want or `room` lines are used. A `room` of None
    gives all.
    """
    if room is None:
        return list(wanted)
    given = [0] * len(wanted)
    while room > 0 and given != list(wanted):
        for index, rows in enumerate(wanted):
            if given[index] < rows and room > 0:
                given[index] += 1
                room -= 1
    return given


def _head(document: Document, view: View, width: int, height: int | None, trouble: str) -> list[Text]:
    minute, row = document.minute, document.row
    at = datetime.fromtimestamp(document.unix_s).strftime("%H:%M:%S")
    title = Text.assemble((f"llmproxy {printable(document.version)}", "bold"), f"  {at}")
    if view.paused:
        title.append("  ").append("paused", "reverse")
    if trouble:
        title.append(f"  {trouble}", "bold red")
    per_s = minute.completed / minute.span_s if minute.span_s else 0.0
    title.append(
        f"  {per_s:.1f} requests/s, {row.get('fleet/output_tokens_per_s', 0.0):,.0f} tokens/s out,"
        f" {row.get('fleet/input_tokens_per_s', 0.0):,.0f} in"
    )
    counts = {
        "refused": minute.refused,
        "failed": minute.failed,
        "cancelled": minute.cancelled,
        "retried": minute.retries,
        "preempted": minute.preemptions,
    }
    told = [f"{minute.completed:,} completed", *(f"{count:,} {name}" for name, count in counts.items() if count)]
    ended = Text(f"in {minute.span_s:.0f} s: {', '.join(told)}")
    if minute.outcomes:
        reasons = sorted(minute.outcomes.items(), key=lambda one: -one[1])
        ended.append(f"; {', '.join(f'{count:,} {printable(name)}' for name, count in reasons)}", "yellow")
    if (cluster := document.cluster) is not None:
        leader = "nobody" if cluster.leader is None else printable(cluster.leader)
        ended.append(f"; {leader} leads {len(cluster.members)} members")
    text = Text(printable(document.summary.text, 1000), LEVEL_STYLES.get(document.summary.level, "red"))
    most = SUMMARY_LINES_MAX if height is None else max(1, min(SUMMARY_LINES_MAX, height // 8))
    return [_line(title), *_wrapped(ended, width, min(most, ENDED_LINES_MAX)), *_wrapped(text, width, most)]


def _wrapped(text: Text, width: int, most: int) -> list[Text]:
    """Returns a text wrapped into at most `most` lines. An ellipsis marks a cut."""
    # The width is known, so a console of that width wraps as the terminal's will.
    lines = text.wrap(Console(width=width), width)
    if len(lines) > most:
        lines[most - 1].truncate(width - 1)
        lines[most - 1].append("…")
    return list(lines[:most])


def _foot(view: View) -> Text:
    if view.typing:
        return _line(Text.assemble("filter: ", (printable(view.filter), "bold"), "_  (Enter keeps, Esc ends it)"))
    keys = Text("  ".join(f"{key} {name}" for key, (name, _) in KEYS.items()), "dim")
    return _line(Text.assemble((f"filter: {printable(view.filter)}", "bold"), "  ", keys) if view.filter else keys)


def _help() -> list[Section]:
    """Returns the sections that explain keys and columns."""
    keys = [[Text(key), Text(does)] for key, (_, does) in KEYS.items()]
    meanings = [[Text(name), Text(meaning)] for name, meaning in HELP.items()]
    return [
        Section([Column("key", True), Column("does", True)], keys),
        Section([Column("column", True), Column("is", True)], meanings),
    ]


def _bands(bands: Sequence[Band]) -> Section:
    columns = [
        Column("band", True),
        Column("waiting"),
        Column("oldest"),
        Column("grants/s", least=WIDE),
        Column("TTFT p50", least=PLAIN),
        Column("p99", least=PLAIN),
        Column("wait p95", least=WIDE),
        Column("why", True),
    ]
    return Section(columns, [_band(one) for one in bands])


def _band(band: Band) -> list[Text]:
    return [
        _name(band.band),
        Text(f"{band.waiting:,}", "yellow" if band.waiting else ""),
        Text(duration(band.oldest_s) if band.waiting else "-"),
        Text(f"{band.grants_per_s:.1f}"),
        Text(duration(band.ttft_s.p50)),
        Text(duration(band.ttft_s.p99)),
        Text(duration(band.wait_s.p95)),
        _name("; ".join(band.reasons)),
    ]


def _replicas(document: Document, view: View) -> Section:
    columns = [
        Column(
            f"{title} {'▼' if view.descending else '▲'}" if title == view.column else title,
            title in ("replica", "state"),
            PLAIN if title in ("hit", "tokens/s", "pace") else 0,
        )
        for title in COLUMNS
    ]
    columns += [Column("pool", True, WIDE), Column("why", True)]
    shown = view.ordered(document.backends)
    rows = [_replica(one) for one in shown]
    if any(one.role != "both" for one in document.backends):
        columns.insert(1, Column("role", True))
        for one, row in zip(shown, rows, strict=True):
            row.insert(1, _name(one.role))
    return Section(columns, rows, document.more_backends)


def _replica(one: Backend) -> list[Text]:
    full = one.limit is not None and one.load >= one.limit
    return [
        _name(one.backend),
        Text(printable(one.state), STATE_STYLES.get(one.state, "yellow")),
        Text(f"{one.load}/{'-' if one.limit is None else one.limit}", "yellow" if full else ""),
        Text(_percent(one.kv_used)),
        Text(_percent(one.hit_share)),
        Text(f"{one.output_tokens_per_s:,.0f}"),
        _pace(one),
        _name(one.pool or "-"),
        _name("" if one.state == "up" else f"for {duration(one.since_s)}" + (f": {one.why}" if one.why else "")),
    ]


def _pace(one: Backend) -> Text:
    """Returns the speed of a replica as text. A slow replica has an exclamation mark in addition to its colour."""
    if one.tokens_slower is None or one.state != "up":
        return Text("-")
    slow = one.tokens_slower >= SLOWER
    return Text(f"{'!' * slow}{one.tokens_slower:.2f}x", "yellow" if slow else "")


def _flows(flows: Sequence[Flow], view: View) -> Section:
    columns = [
        Column("flow", True),
        Column("band", True),
        Column("share"),
        Column("due"),
        *(Column(title, least=PLAIN) for title in ("tokens/s", "waiting", "oldest")),
        Column("", True),
    ]
    return Section(columns, [_flow(one) for one in flows if view.shows(one.flow, one.band)])


def _flow(one: Flow) -> list[Text]:
    return [
        _name(one.flow),
        _name(one.band),
        Text(_percent(one.share)),
        Text(_percent(one.due)),
        Text(f"{one.tokens_per_s:,.0f}"),
        Text(f"{one.waiting:,}", "yellow" if one.waiting else ""),
        Text(duration(one.oldest_s) if one.waiting else "-"),
        Text(),
    ]


def _events(document: Document, view: View) -> Section:
    shown = [one for one in document.events if view.shows(one.event, one.text)][:EVENTS_MAX]
    return Section([Column("last events"), Column("", True)], [_event(one, document) for one in shown])


def _event(one: Event, document: Document) -> list[Text]:
    at = datetime.fromtimestamp(min(max(0.0, document.unix_s - document.now_s + one.at_s), 1e11))
    today = at.date() == datetime.fromtimestamp(document.unix_s).date()
    return [
        Text(at.strftime("%H:%M:%S" if today else "%m-%d %H:%M")),
        Text(printable(f"{one.event} {one.text}"), LEVEL_STYLES.get(one.level, ""), no_wrap=True),
    ]


def _table(section: Section, count: int, width: int) -> Table:
    """Returns the first `count` lines of a section. If rows are left out, the last line shows their number."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="reverse", expand=True)
    shown = [index for index, column in enumerate(section.columns) if width >= column.least]
    for index in shown:
        column, last = section.columns[index], index == shown[-1]
        table.add_column(
            column.title,
            no_wrap=True,
            overflow="ellipsis",
            justify="left" if column.words else "right",
            ratio=1 if last else None,
            min_width=None if index else FIRST_COLUMN,
            max_width=None if last else max(FIRST_COLUMN, width // 5),
        )
    whole = len(section.rows) if count >= section.wanted else max(0, count - 1)
    for row in section.rows[:whole]:
        table.add_row(*(row[index] for index in shown))
    if hidden := len(section.rows) - whole + section.more:
        table.add_row(Text(f"{hidden:,} more", "dim"))
    return table


def duration(seconds: float | None) -> str:
    """Returns a time in seconds as text of at most six characters; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    for unit_s, unit in ((60.0, "min"), (3600.0, "h")):
        if seconds < 99.5 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86400.0:.0f} d"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _name(text: str) -> Text:
    return Text(printable(text))


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
