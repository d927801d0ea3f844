"""What each flow was charged beyond the others, as far as the members of a cluster know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmproxy.cluster.protocol import Balances

FLOWS_MAX = 4096
"""Flows of one message, so that it stays below the limit of a frame."""
KNOWN_MAX = 50_000
"""Flows of one band that a member remembers. Beyond, the balances of others start at the level."""


class KnownBalances:
    """The balances that were told, or heard of, last: `known` has them by pool and band."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], dict[str, float]] = {}

    def changes(self, now: Mapping[tuple[str, int], Mapping[str, float]]) -> Iterator[Balances]:
        """What is to be told to those who know `known`, so that they know `now`."""
        for band, balances in now.items():
            known = self.known.get(band, {})
            changed = {flow: balance for flow, balance in balances.items() if known.get(flow) != balance}
            self.known[band] = {**balances}
            yield from _told(band, changed)
        for gone in self.known.keys() - now.keys():
            del self.known[gone]

    def all(self) -> Iterator[Balances]:
        """What is to be told to those who know nothing."""
        for band, balances in self.known.items():
            yield from _told(band, balances)

    def take(self, told: Balances) -> None:
        """Remember what was told."""
        known = self.known.setdefault((told.pool, told.band), {})
        for flow, balance in told.flows.items():
            known.pop(flow, None)
            known[flow] = balance
        while len(known) > KNOWN_MAX:
            del known[next(iter(known))]


def _told(band: tuple[str, int], flows: Mapping[str, float]) -> Iterator[Balances]:
    names = list(flows)
    for begin in range(0, len(names), FLOWS_MAX):
        yield Balances(*band, {name: flows[name] for name in names[begin : begin + FLOWS_MAX]})
