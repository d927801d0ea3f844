"""The command `usage`, which prints the use of a tenant, its limits, and how much of them is left."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from llmproxy.gateway.http.routes import USAGE
from llmproxy.tools.terminal import console, printable
from llmproxy.tools.top.ask import AskError, ProxyAddress, asking

COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "estimated_tokens")


async def usage(target: ProxyAddress, *, as_json: bool) -> None:
    """Prints the use of the tenant to which the key of `target` belongs. Raises AskError."""
    async with asking(target) as asker:
        found = await asker.get(USAGE)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    try:
        table, text = _table(found), _limits(found)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise AskError(f"{target} answers {USAGE} in another form than this version knows") from None
    screen = console()
    screen.print(table)
    screen.print(text)


def _table(found: dict[str, Any]) -> Table:
    table = Table(title=printable(f"{found['tenant'] or found['key'] or 'all clients'}"), title_justify="left")
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    today, month = found["today"], found["month"]
    _rows(table, f"today, {today['day']}", today)
    _rows(table, f"month, {month['month']}", month)
    return table


def _rows(table: Table, name: str, part: dict[str, Any]) -> None:
    table.add_row(name, *_numbers(part), style="bold")
    for model, used in part["by_model"].items():
        table.add_row(f"  {printable(model)}", *_numbers(used))


def _numbers(part: dict[str, Any]) -> list[str]:
    return [f"{int(part[name]):,}" for name in COLUMNS]


def _limits(found: dict[str, Any]) -> str:
    limits = found["limits"]
    lines = [
        f"{name.replace('_', ' ')}: {value:,.10g}"
        + (f", {limits[f'{name}_left']:,} left" if f"{name}_left" in limits else "")
        for name, value in limits.items()
        if not name.endswith("_left")
    ]
    hours, seconds = divmod(int(found["day_ends_in_s"]), 3600)
    lines.append(f"The day ends in {hours} h {seconds // 60} min ({printable(found['time_zone'])}).")
    return "\n".join(lines)
