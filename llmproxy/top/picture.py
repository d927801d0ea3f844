"""The picture of `llmproxy top`: pure functions from the document to what rich draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmproxy.terminal import printable
from llmproxy.top.document import Backend, Band, Document, Event, Explained, Flow
from llmproxy.top.view import COLUMNS, View

LEVEL_STYLES = {"ok": "green", "info": "", "warning": "yellow", "bad": "red", "error": "red"}
STATE_STYLES = {"up": "green", "down": "red"}
KEYS = "s sort  r reverse  / filter  p pause  e last choices  q quit"
EVENTS_MAX = 8
SUMMARY_LINES_MAX = 3
FIRST_COLUMN = 10
"""Narrowest first column, so that sections with short names stand alike."""
EXTRA_COLUMNS = 110
"""From this width on, there is room for more columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a section. A name is cut at a quarter of the width, the last column takes the rest."""

    title: str
    words: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A table that may lose rows where the terminal is small."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    more: int = 0
    """Rows that the proxy did not send."""


def picture(
    document: Document,
    view: View,
    width: int,
    height: int | None = None,
    *,
    choices: Explained | None = None,
    trouble: str = "",
) -> RenderableType:
    """The state of one second in `width` columns and `height` lines, None: as many as it takes.

    `choices` are shown in the place of flows and events. `trouble` says that the document is old.
    """
    head = _head(document, view, width, trouble)
    wide = width >= EXTRA_COLUMNS
    sections = [_bands(document.bands), _replicas(document, view, wide)]
    if choices is None:
        sections += [_flows(document.flows, view), _events(document)]
    else:
        sections.append(_choices(choices))
    sections = [one for one in sections if one.rows or one.more]
    foot = [] if height is None else [_foot(view)]
    room = None if height is None else height - len(head) - len(foot) - 2 * len(sections)
    while room is not None and sections and room < len(sections):
        sections.pop()
        room += 2
    lines: list[RenderableType] = [*head]
    for section, count in zip(sections, _shares([len(one.rows) for one in sections], room), strict=True):
        lines += [Text(), _table(section, count, width)]
    return Group(*lines, *foot)


def _shares(wanted: Sequence[int], room: int | None) -> list[int]:
    """Rows for each section, one at a time in turn until all have what they want or the room is used up."""
    if room is None:
        return list(wanted)
    given = [0] * len(wanted)
    while room > 0 and given != list(wanted):
        for index, rows in enumerate(wanted):
            if given[index] < rows and room > 0:
                given[index] += 1
                room -= 1
    return given


def _head(document: Document, view: View, width: int, trouble: str) -> list[Text]:
    minute, row = document.minute, document.row
    at = datetime.fromtimestamp(document.unix_s).strftime("%H:%M:%S")
    title = Text.assemble((f"llmproxy {printable(document.version)}", "bold"), f"  {at}")
    if view.paused:
        title.append("  paused", "reverse")
    if trouble:
        title.append(f"  {trouble}", "bold red")
    per_s = minute.completed / minute.span_s if minute.span_s else 0.0
    rates = (
        f"{per_s:.1f} requests/s, {row.get('fleet/output_tokens_per_s', 0.0):,.0f} tokens/s out,"
        f" {row.get('fleet/input_tokens_per_s', 0.0):,.0f} in"
    )
    counts = {
        "refused": minute.refused,
        "failed": minute.failed,
        "cancelled": minute.cancelled,
        "retried": minute.retries,
        "preempted": minute.preemptions,
    }
    told = [f"{count:,} {name}" for name, count in counts.items() if count]
    if told:
        rates += f"; in {minute.span_s:.0f} s {', '.join(told)}"
    text = Text(printable(document.summary.text, 1000), LEVEL_STYLES.get(document.summary.level, "red"))
    # The width is known, so a console of that width wraps as the terminal's will.
    sentence = text.wrap(Console(width=width), width)[:SUMMARY_LINES_MAX]
    return [_line(title), _line(Text(rates)), *sentence]


def _foot(view: View) -> Text:
    if view.typing:
        return _line(Text.assemble("filter: ", (printable(view.filter), "bold"), "_  (Enter keeps, Esc clears)"))
    kept = f"  [filter: {printable(view.filter)}]" if view.filter else ""
    return _line(Text(KEYS + kept, "dim"))


def _bands(bands: Sequence[Band]) -> Section:
    columns = [
        Column("band", True),
        *map(Column, ("waiting", "oldest", "grants/s", "TTFT p50", "p99", "wait p95")),
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


def _replicas(document: Document, view: View, wide: bool) -> Section:
    columns = [
        Column(
            f"{title} {'▼' if view.descending else '▲'}" if title == view.column else title,
            title in ("replica", "state"),
        )
        for title in COLUMNS
    ]
    columns += [Column("pool", True)] if wide else []
    return Section(
        [*columns, Column("why", True)],
        [_replica(one, wide) for one in view.ordered(document.backends)],
        document.more_backends,
    )


def _replica(one: Backend, wide: bool) -> list[Text]:
    full = one.limit is not None and one.load >= one.limit
    cells = [
        _name(one.backend),
        Text(printable(one.state), STATE_STYLES.get(one.state, "yellow")),
        Text(f"{one.load}/{'-' if one.limit is None else one.limit}", "yellow" if full else ""),
        Text(_percent(one.kv_used)),
        Text(_percent(one.hit_share)),
        Text(f"{one.output_tokens_per_s:,.0f}"),
        Text("-" if one.tokens_slower is None else f"{one.tokens_slower:.2f}x"),
    ]
    cells += [_name(one.pool or "-")] if wide else []
    return [*cells, _name(f"{one.why or one.state} since {duration(one.since_s)}" if one.state != "up" else "")]


def _flows(flows: Sequence[Flow], view: View) -> Section:
    columns = [
        Column("flow", True),
        Column("band", True),
        *map(Column, ("share", "due", "tokens/s", "waiting", "oldest")),
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


def _events(document: Document) -> Section:
    return Section(
        [Column("last events"), Column("", True)], [_event(one, document) for one in document.events[:EVENTS_MAX]]
    )


def _event(one: Event, document: Document) -> list[Text]:
    ago = Text(f"{duration(max(0.0, document.now_s - one.at_s))} ago")
    return [ago, Text(printable(f"{one.event} {one.text}"), LEVEL_STYLES.get(one.level, ""), no_wrap=True)]


def _choices(explained: Explained) -> Section:
    """The newest choices of all pools, each with the prices of its candidates."""
    found = [one for pool in explained.pools for one in pool.choices]
    rows = []
    for one in sorted(found, key=lambda one: one.age_s):
        asked = printable(f"{one.request}: {one.prompt_tokens} tokens for {one.model}")
        rows.append([Text(f"{duration(one.age_s)} ago"), Text(asked, "bold")])
        rows += [
            [Text(), Text(printable(each.line), "green" if each.backend == one.chosen else "")]
            for each in one.candidates
        ]
    return Section([Column("last choices"), Column("", True)], rows)


def _table(section: Section, count: int, width: int) -> Table:
    """The first `count` rows; the last of them says how many more there are."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    for index, column in enumerate(section.columns):
        last = index == len(section.columns) - 1
        table.add_column(
            column.title,
            no_wrap=True,
            overflow="ellipsis",
            justify="left" if column.words else "right",
            ratio=1 if last else None,
            min_width=None if index else FIRST_COLUMN,
            max_width=None if last else max(FIRST_COLUMN, width // 5),
        )
    cut = count < len(section.rows) or section.more
    shown = max(0, count - 1) if count < len(section.rows) else count
    for row in section.rows[:shown]:
        table.add_row(*row)
    if cut:
        table.add_row(Text(f"{len(section.rows) - shown + section.more:,} more", "dim"))
    return table


def duration(seconds: float | None) -> str:
    """A time in at most six characters."""
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
