"""The table of `llmproxy whatif`: tokens per second of each flow, with the current weights and with other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from math import inf, isfinite
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmproxy.observe.live.events import STATE_EVENTS
from llmproxy.observe.live.minute import SPAN_S
from llmproxy.tools.terminal import printable
from llmproxy.tools.top.ask import AskError
from llmproxy.tools.top.document import Document, Flow

NAMES_SHOWN = 10

CANNOT_KNOW = (
    "Higher bands go first, whatever the weights: a weight moves tokens between the flows of one band only.",
    "'then' assumes that flows which wait would use whatever they are given, and that the others ask for no more than"
    " now. Nobody can know that beforehand.",
    "It also assumes that a token of each flow costs the same. The proxy charges output tokens and uncached prompt"
    " tokens by their weights, and no cached ones. Where 'now' is not as 'by weight', 'then' may be further off.",
)
SEVERAL_POOLS = (
    "This takes all pools as one, because flows are not counted by pool. Flows of different pools share nothing."
)


def weights_of(given: Sequence[str]) -> dict[str, float]:
    """Returns flow -> weight, from texts such as `team-a=3`. Raises AskError."""
    weights = {}
    for text in given:
        flow, _, value = text.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if not flow or not (weight > 0.0 and isfinite(weight)):
            raise AskError(f"--weight {printable(text)} should be a flow and a weight above 0, as in --weight team-a=3")
        weights[flow] = weight
    return weights


def whatif(seen: Document, weights: Mapping[str, float]) -> RenderableType:
    """Returns a table of the rate of each flow, now and with `weights`.

    Raises AskError if there are no flows, if `weights` names an unknown flow, or if the proxy does not share tokens by
    weight.
    """
    if seen.fairness != "fair_share":
        raise AskError(f"scheduling.fairness is {seen.fairness}, which shares no tokens by weight")
    known = sorted({one.flow for one in seen.flows})
    if not known:
        raise AskError("no flow waits, and none had a request in the last minute")
    if unknown := sorted(weights.keys() - set(known)):
        more = f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
        shown = f"{', '.join(known[:NAMES_SHOWN])}{more}"
        raise AskError(printable(f"{', '.join(unknown)}: no such flow in the last minute, which had {shown}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("flow", "band", "weight", "now", "by weight", "then", "waits"):
        table.add_column(title, justify="left" if title in ("flow", "band", "waits") else "right")
    notes = _changes(seen)
    for band, group in groupby(sorted(seen.flows, key=lambda one: one.band), key=lambda one: one.band):
        flows = list(group)
        if not any(one.waiting for one in flows):
            notes.append(f"Nothing waits in {printable(band)}, so that no weight of its flows changes anything.")
        today, then = _shares(flows, {}), _shares(flows, weights)
        for one in flows:
            changed = weights.get(one.flow, one.weight)
            weight = f"{one.weight:g}" + (f" -> {changed:g}" if changed != one.weight else "")
            rates = (f"{rate:,.1f}" for rate in (one.tokens_per_s, today[one.flow], then[one.flow]))
            waits = f"{one.waiting:,}" if one.waiting else "no"
            table.add_row(Text(printable(one.flow)), Text(printable(band)), weight, *rates, waits)
    notes += [*CANNOT_KNOW, *([SEVERAL_POOLS] if len(seen.pools) > 1 else [])]
    return Group(Text("Tokens per second, of prompts and answers:\n"), table, Text("\n" + "\n".join(notes)))


def _changes(seen: Document) -> list[str]:
    """Returns a warning if a backend changed within the measured minute; empty otherwise."""
    since_s = seen.now_s - seen.minute.span_s
    changed = (one for one in seen.events if one.event in STATE_EVENTS | {"backend_removed"} and one.at_s > since_s)
    if (last := next(changed, None)) is None:
        return []
    ago_s, what = seen.now_s - last.at_s, printable(f"{last.event} {last.backend}")
    return [
        f"The fleet changed {ago_s:.0f} s ago ({what}). 'now' is measured over the last {seen.minute.span_s:.0f} s,"
        " so it mixes two fleets, and 'by weight' and 'then' are computed from it."
        f" Ask again in {SPAN_S - ago_s:.0f} s."
    ]


def _shares(flows: Sequence[Flow], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the rate of each flow if the total rate of a band is divided by weight.

    A flow without waiting requests gets at most its current rate.
    """
    claims = {
        one.flow: Claim(weights.get(one.flow, one.weight), inf if one.waiting else one.tokens_per_s) for one in flows
    }
    return max_min(sum(one.tokens_per_s for one in flows), claims)


class Claim(NamedTuple):
    """The weight of a flow, and the most that it can use."""

    weight: float  # > 0
    demand: float  # The most that the flow can use; infinite for a flow with waiting requests.


def max_min(capacity: float, claims: Mapping[str, Claim]) -> dict[str, float]:
    """Returns the part of `capacity` that each flow gets, in the unit of `capacity`.

    No flow gets more than its demand. Flows that get less than their demand get equal shares per unit of weight, and no
    other flow gets more per unit. This is progressive filling (Bertsekas and Gallager, "Data Networks", section 6.5.2).
    """
    ordered = sorted(claims, key=lambda flow: claims[flow].demand / claims[flow].weight)
    # Summed from the end: subtracting weights from their sum would lose small weights to rounding.
    weights = list(accumulate(claims[flow].weight for flow in reversed(ordered)))[::-1]
    shares: dict[str, float] = {}
    for flow, weight in zip(ordered, weights, strict=True):
        shares[flow] = min(claims[flow].demand, capacity * claims[flow].weight / weight)
        capacity -= shares[flow]
    return shares
