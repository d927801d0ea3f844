"""The history of one request as `llmproxy explain` prints it: its wait, its attempts, the prices of its candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from llmproxy.core.domain import Stage
from llmproxy.tools.terminal import printable
from llmproxy.tools.top.ask import AskError
from llmproxy.tools.top.picture import duration


def story(found: Mapping[str, Any]) -> RenderableType:
    """Returns the answer of `/debug/requests?request=` as text.

    Raises AskError if its fields differ, as in another version.
    """
    try:
        lines = [Text(f"request {printable(found['request'])}", "bold")]
        lines += [] if found["ended"] is None else [_asked(found["ended"])]
        lines += [] if found["waits"] is None else [_waits(found["waits"]), *_waited(found["waits"])]
        begun = False
        for number, attempt in enumerate(found["attempts"], 1):
            lines += [Text(), *_attempt(number, attempt, begun=begun)]
            begun = begun or bool(attempt.get("committed"))
        if (waited := found["waited"]) is not None:
            lines += [Text(), Text(f"  {waited['queued_s']:>8.3f} s  begins to wait"), *_waited(waited)]
        lines += [] if found["ended"] is None else [Text(), _end(found["ended"])]
        return Group(*lines, *(line for choice in found["choices"] for line in _choice(choice)))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise AskError(f"this is not the history of a request in this version of llmproxy: {error!r}") from None


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


def _attempt(number: int, attempt: Mapping[str, Any], *, begun: bool) -> Iterator[Text]:
    """Yields the events of an attempt, with their times in seconds after the request arrived.

    `begun`: the client has the beginning of the answer, so the attempt generates the rest.
    """
    what = f"attempt {number}" if attempt["stage"] == Stage.WHOLE else f"{number}. {attempt['stage']}"
    what += f" on {attempt['backend']}" if attempt["backend"] else ""
    yield Text(printable(what + ", for the rest of the answer" * begun), "bold")
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
    if ended.get("continued"):
        text += f"; continued ({ended['continued']})"
    if ended.get("not_continued"):
        text += f"; not continued: {ended['not_continued']}"
    if ended.get("ended_age_s") is not None:
        text += f"; {duration(ended['ended_age_s'])} ago"
    fine = ended["kind"] == "completed"
    return Text(
        printable(text + (f"\n{ended['error']}" if ended.get("error") else ""), 1000), "green" if fine else "red"
    )


def _choice(choice: Mapping[str, Any]) -> Iterator[Text]:
    """Yields the price of each candidate of a placement decision. `×` marks a candidate without a free slot."""
    yield Text()
    yield Text(printable(f"choice in {choice['pool']}, {duration(choice['age_s'])} ago; prices:"), "bold")
    for one in choice["candidates"]:
        chosen = one["backend"] == choice["chosen"]
        mark, style = ("→", "green") if chosen else (" ", "") if one["fits"] else ("×", "dim")
        yield Text(f"{mark} {printable(one['backend'])}: {printable(one['price'])}", style)
