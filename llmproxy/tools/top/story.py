"""The story of one request as `llmproxy explain` prints it: its wait, its attempts, the prices of its candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmproxy.core.domain import Stage
from llmproxy.tools.terminal import printable
from llmproxy.tools.top.ask import AskError
from llmproxy.tools.top.picture import duration

TERM_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
TERM_MARKS = "█▓▒░▞▚▤"
"""Marks that distinguish terms without colours."""
BAR_MIN = 10


def story(found: Mapping[str, Any], width: int) -> RenderableType:
    """The answer of `/debug/requests?request=`, drawn. Raises AskError if it does not fit, as from another version."""
    try:
        lines = [Text(f"request {printable(found['request'])}", "bold")]
        lines += [] if found["ended"] is None else [_asked(found["ended"])]
        lines += [] if found["waits"] is None else [_waits(found["waits"]), *_waited(found["waits"])]
        for number, attempt in enumerate(found["attempts"], 1):
            lines += [Text(), *_attempt(number, attempt)]
        if (waited := found["waited"]) is not None:
            lines += [Text(), Text(f"  {waited['queued_s']:>8.3f} s  begins to wait"), *_waited(waited)]
        lines += [] if found["ended"] is None else [Text(), _end(found["ended"])]
        return Group(*lines, *(part for choice in found["choices"] for part in (Text(), _choice(choice, width))))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise AskError(f"this is not the story of this version of llmproxy: {error!r}") from None


def _asked(ended: Mapping[str, Any]) -> Text:
    parts = [f"{ended['method']} {ended['path']}"]
    parts += [
        f"{name.replace('_', ' ')} {ended[name]}"
        for name in ("model", "tenant", "key", "band", "flow", "client", "user_agent")
        if ended.get(name)
    ]
    parts += [f"{ended['prompt_tokens']:,} prompt tokens"] if ended.get("prompt_tokens") is not None else []
    return Text(", ".join(printable(part) for part in parts))


def _waits(waits: Mapping[str, Any]) -> Text:
    flow = waits["ahead_in_flow"]
    text = (
        f"waits for {duration(waits['waited_s'])} in band {waits['band']}, flow {waits['flow']}:"
        f" {waits['ahead_in_higher_bands']} ahead in higher bands, {'many' if flow is None else flow} in its flow;"
        f" refused in {duration(waits['left_s'])}"
    )
    return Text(printable(text, 1000), "yellow")


def _attempt(number: int, attempt: Mapping[str, Any]) -> Iterator[Text]:
    """The moments of an attempt, in seconds from the arrival of the request."""
    what = f"attempt {number}" if attempt["stage"] == Stage.WHOLE else f"{number}. {attempt['stage']}"
    yield Text(printable(what + (f" on {attempt['backend']}" if attempt["backend"] else "")), "bold")
    ahead = attempt["queued_ahead"]
    predicted = attempt["predicted_ttft"]
    probe = " as a probe, because its replica was ejected," if (attempt["why"] or {}).get("probe") else ""
    moments = [
        ("queued_s", "begins to wait"),
        ("granted_s", f"is granted{probe}" + ("" if ahead is None else f" while {ahead:,} of its pool wait")),
        ("first_byte_s", "first byte"),
        ("ended_s", f"ends: {attempt['verdict']}" + (f", status {attempt['status']}" if attempt["status"] else "")),
    ]
    if predicted is not None and attempt["first_byte_s"] is not None and attempt["granted_s"] is not None:
        took = duration(attempt["first_byte_s"] - attempt["granted_s"])
        moments[2] = (
            "first_byte_s",
            f"first byte, {took} after the grant; predicted {duration(predicted['expected_s'])}",
        )
    for name, text in moments:
        if attempt[name] is not None:
            yield Text(printable(f"  {attempt[name]:>8.3f} s  {text}"))
        if name == "queued_s" and attempt["why"]:
            yield from _waited(attempt["why"])
    if attempt["error"]:
        yield Text(printable(f"              {attempt['error']}", 1000), "red")


def _waited(why: Mapping[str, Any]) -> Iterator[Text]:
    if why["waited_for"]:
        first = ", ".join(f"{count:,} of {flow or 'no name'} ({band})" for band, flow, count in why["went_first"])
        yield Text(
            printable(f"              waited: {why['waited_for']}" + (f"; before it went {first}" * bool(first)), 300)
        )


def _end(ended: Mapping[str, Any]) -> Text:
    status = f" ({ended['status']})" if ended.get("status") else ""
    text = f"{ended['outcome']}{status} after {ended['duration_s']:.3f} s"
    if ended.get("queue_wait_s") is not None:
        text += f", of which {ended['queue_wait_s']:.3f} s in the queue"
    if ended.get("cached_tokens") is not None and ended.get("expected_cached_tokens") is not None:
        text += f"; {ended['cached_tokens']:,} cached tokens, {ended['expected_cached_tokens']:,} expected"
    if ended.get("output_tokens") is not None:
        text += f"; {ended['output_tokens']:,} output tokens"
    if ended.get("ended_age_s") is not None:
        text += f"; {duration(ended['ended_age_s'])} ago"
    fine = ended["kind"] == "completed"
    return Text(
        printable(text + (f"\n{ended['error']}" if ended.get("error") else ""), 1000), "green" if fine else "red"
    )


def _choice(choice: Mapping[str, Any], width: int) -> RenderableType:
    """The prices of the candidates as bars: the cheapest that fits is chosen."""
    candidates = choice["candidates"]
    title = f"choice in {choice['pool']}, {duration(choice['age_s'])} ago: {choice['chosen']}; prices:"
    names = list(dict.fromkeys(name for one in candidates for name, s in one["terms"].items() if s > 0.0))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(10, width // 4))
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis")
    room = max(BAR_MIN, width - max(10, width // 4) - 34)
    # Another program may send terms that exceed their total, and a bar must not exceed its room.
    totals = [max(one["total_s"], sum(max(0.0, s) for s in one["terms"].values())) for one in candidates]
    highest = max(totals, default=0.0)
    for one in candidates:
        bar = _bar(one["terms"], names, room / highest if highest > 0.0 else 0.0)
        bar.append("" if one["fits"] else " takes no request now", "dim")
        chosen = one["backend"] == choice["chosen"]
        table.add_row(Text(printable(one["backend"]), "bold" if chosen else ""), f"{one['total_s']:.3f} s", bar)
    legend = Text()
    for index, name in enumerate(names):
        legend.append(_mark(index), _style(index)).append(f" {printable(name)}  ")
    return Group(Text(printable(title), "bold"), table, legend)


def _bar(terms: Mapping[str, float], names: list[str], columns_per_s: float) -> Text:
    """The terms side by side. Ends are rounded, not lengths, so that the bar is as long as the rounded sum."""
    bar, end_s = Text(), 0.0
    for index, name in enumerate(names):
        end_s += max(0.0, terms.get(name, 0.0))
        bar.append(_mark(index) * (round(end_s * columns_per_s) - len(bar)), _style(index))
    return bar


def _mark(index: int) -> str:
    return TERM_MARKS[index % len(TERM_MARKS)]


def _style(index: int) -> str:
    return TERM_STYLES[index % len(TERM_STYLES)]
