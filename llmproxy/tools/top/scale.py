"""The tables of `llmproxy scale`: the replicas of each pool, how many its load needs, and why."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmproxy.tools.terminal import printable
from llmproxy.tools.top.ask import AskError

REASONS = {
    "work": "what arrives",
    "ahead": "what arrives, and grows",
    "queue": "what waits",
    "seats": "answers under way",
    "kv": "the KV-cache",
    "adapters": "adapters in use",
    "idle": "nothing is asked",
    "min": "scaling.min",
    "max": "scaling.max",
    "unknown": "too little is known: as many as there are",
}
"""The reason in the answer of `/scale` -> a text for people."""
TERMS = ("work", "ahead", "queue", "seats", "kv", "adapters")


def scale(found: dict[str, Any]) -> RenderableType:
    """Returns the answer of `/scale` as tables. Raises AskError if its fields differ, as in another version."""
    try:
        pools = found["pools"]
        if not pools:
            return Text("No pool is known yet.")
        parts: list[RenderableType] = [_pools(pools), Text(), _terms(pools)]
        if any(pool["roles"] for pool in pools):
            parts += [Text(), _roles(pools)]
        return Group(*parts)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise AskError(f"this is not the scale of this version of llmproxy: {error!r}") from None


def _pools(pools: list[dict[str, Any]]) -> Table:
    table = _table("pool", "up", "needs", "wants", "because of", "one replica serves", "waiting")
    for pool in pools:
        replica, waiting = pool["replica"], pool["waiting"]
        serves = (
            "unknown" if replica is None else f"{replica['requests_per_s']:,.2f}/s, {replica['seats']:,.0f} at once"
        )
        wants = Text(f"{pool['desired']:,}", "" if pool["desired"] == pool["replicas"]["up"] else "bold yellow")
        reason = REASONS.get(pool["reason"], printable(str(pool["reason"])))
        waits = f"{waiting['requests']:,}" + (f" ({waiting['seconds']:,.1f} s)" if waiting["seconds"] else "")
        need = f"{pool['need']:.2f}" if pool["sure"] else "-"
        # rich would read markup in a plain str.
        name, up, because = Text(printable(pool["pool"])), f"{pool['replicas']['up']:,}", Text(reason)
        table.add_row(name, up, need, wants, because, serves, waits)
    return table


def _terms(pools: list[dict[str, Any]]) -> Table:
    """Returns a table of the replicas that each part of the work would need alone."""
    table = _table("replicas for", *TERMS, "prompts", "answers")
    for pool in pools:
        if pool["terms"]:
            values = [f"{pool['terms'][term]:.2f}" for term in TERMS]
            table.add_row(Text(printable(pool["pool"])), *values, f"{pool['prefill']:.2f}", f"{pool['decode']:.2f}")
    return table


def _roles(pools: list[dict[str, Any]]) -> Table:
    """Returns a table of the replicas of each role of all pools."""
    table = _table("role", "pool", "up", "needs", "wants")
    for pool in pools:
        for name, one in pool["roles"].items():
            wants = Text(f"{one['desired']:,}", "" if one["desired"] == one["up"] else "bold yellow")
            role, of = Text(printable(name)), Text(printable(pool["pool"]))
            table.add_row(role, of, f"{one['up']:,}", f"{one['need']:.2f}", wants)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, title in enumerate(titles):
        table.add_column(title, justify="left" if at == 0 or title in ("because of", "one replica serves") else "right")
    return table
