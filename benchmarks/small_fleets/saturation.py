"""Checks full fleets: their throughput, the answer of `/scale`, the waits of critical requests, and shares of flows.

The throughput is compared with direct access to the replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.load import FLOW, OBJECTIVE, Seen, Work, details, failures, first_s, percentile
from benchmarks.small_fleets.stage import Check, Stage, staged, true

COLD_S = 15.0
SETTLE_S, WINDOW_S, ROUNDS = 2.5, 7.0, 1
CLIENTS_PER_PLACE = 3
LONG_S = 10.0  # Much longer than any answer of the flood, whose end makes room for a critical request.
LARGE = 100
"""From this number of slots on, the replicas run at a third of their speed, so that the cores are not the limit."""


async def throughput(sizes: Sequence[int], stream: bool, tree: Path | None) -> list[Check]:
    """Checks the tokens per second through a cold and a warm proxy.

    They are divided by the tokens per second of direct access to the replicas.
    """
    speed = 0.4 if sum(sizes) < LARGE else 0.13
    work = Work(stream, tokens=range(16, 129))
    async with staged(sizes, speed=speed, tree=tree) as stage:
        # Both begin cold, because clients and engines take a moment to fill as well.
        direct = [await _saturated(stage, sizes, work, COLD_S, direct=True)]
        proxied = [await _saturated(stage, sizes, work, COLD_S)]
        for _ in range(ROUNDS):
            direct.append(await _saturated(stage, sizes, work, SETTLE_S, direct=True))
            proxied.append(await _saturated(stage, sizes, work, SETTLE_S))
        limits = await stage.limits()
    advice = proxied[-1].advice
    replica = advice.get("replica") or {}
    said = (replica.get("requests_per_s") or 0.0) * len(sizes)
    answered = fmean(one.answers_per_s for one in proxied)
    warm = sum(one.tokens_per_s for one in proxied) / sum(one.tokens_per_s for one in direct)
    return [
        Check("warm / direct", warm, least=0.98, note=f"limits {limits}"),
        Check("first 15 s / direct", proxied[0].before_per_s / direct[0].before_per_s, least=0.93),
        true("/scale need is above what is up", (advice.get("need") or 0.0) > len(sizes), str(advice.get("reason"))),
        Check("/scale places over true ones", (replica.get("seats") or 0) * len(sizes) / sum(sizes), 0.75, 1.25),
        Check("/scale capacity over answers", said / answered, 0.75, 1.25),
    ]


@dataclass(frozen=True, slots=True)
class _Saturated:
    """The rates of a full fleet."""

    before_per_s: float
    """The tokens per second before the measured window."""
    tokens_per_s: float
    """The tokens per second in the measured window."""
    answers_per_s: float
    advice: dict[str, Any]
    """The answer of `/scale` at the end."""


async def _saturated(
    stage: Stage, sizes: Sequence[int], work: Work, until_s: float, *, direct: bool = False
) -> _Saturated:
    """Fills the fleet with new clients, and measures a window that begins after `until_s`.

    With `direct`, each client uses the replica with the fewest requests of these clients; otherwise the proxy.
    """
    urls = stage.fleet.replica_urls
    async with stage.clients(work) as clients:

        def least() -> str:
            return min(urls, key=lambda url: clients.running[url])

        clients.closed(CLIENTS_PER_PLACE * sum(sizes), least if direct else stage.proxy)
        before = await stage.tokens_per_s(until_s)
        ended = len(clients.seen)
        tokens = await stage.tokens_per_s(WINDOW_S)
        answers = sum(one.whole for one in clients.seen[ended:])
        return _Saturated(before, tokens, answers / WINDOW_S, await stage.fleet.json("/scale/sim"))


async def critical(sizes: Sequence[int], stream: bool, tree: Path | None) -> list[Check]:
    """Checks the waits of two critical requests a second during a flood.

    The waits are compared with the waits of the same requests in an idle fleet.
    """
    urgent = Work(stream, tokens=(24,), headers={OBJECTIVE: "critical"})
    async with staged(sizes, tree=tree) as stage:
        async with stage.clients(Work(stream, range(32, 129))) as flood, stage.clients(urgent) as clients:
            flood.closed(4 * sum(sizes), stage.proxy)
            await flood.rate(10.0)
            clients.poisson(2.0, stage.proxy)
            await flood.rate(25.0)
            ages_s = clients.ages_s()
        async with stage.clients(urgent) as alone:
            for _ in range(5):
                await alone.ask(stage.proxy())
        exits = [one for one in stage.fleet.exits() if "granted_s" in one]
    waits_s = [one["granted_s"] - one["arrived_s"] for one in exits if one.get("band") == "critical"]
    inversions = sum(
        one["arrived_s"] + 0.005 < other["granted_s"] < one["granted_s"] - 0.0005
        for one in exits if one.get("band") == "critical" for other in exits if other.get("band") != "critical"
    )  # fmt: skip
    return [
        Check("critical first token, median over alone", first_s(clients.seen, 0.5) / first_s(alone.seen, 0.5), most=4),
        *answered(clients.seen, ages_s),
        Check("critical waits p95, s", percentile(waits_s, 0.95)),
        Check("lower band granted while a critical one waited", inversions, most=0),
        Check("flood first token, s", first_s(flood.seen, 0.5)),
    ]


def answered(seen: Sequence[Seen], ages_s: Sequence[float]) -> list[Check]:
    """Checks that no request failed before its first token, and that none waits long for it.

    The figures of ended requests have neither. `ages_s` are the seconds since the waiting requests were sent.
    """
    return [
        Check("critical requests that failed", len(failures(seen)), most=0, note=details(seen)),
        Check("longest critical wait at the end, s", max(ages_s, default=0.0), most=LONG_S),
    ]


async def shares(tree: Path | None) -> list[Check]:
    """Checks the share of a flow in the output while another flow of its band has ten times as many clients."""
    tokens = Counter[str]()
    async with staged((8, 8), tree=tree) as stage:
        few, many = (stage.clients(Work(headers={FLOW: flow})) for flow in ("few", "many"))
        async with few, many:
            few.closed(24, stage.proxy)
            many.closed(240, stage.proxy)
            await few.rate(30.0)
        exits = [one for one in stage.fleet.exits() if "granted_s" in one]
    began_s = min(one["arrived_s"] for one in exits)
    for one in exits:
        # The first grants go to a queue that is not full. The last answers have no log line yet.
        if 5.0 < one["granted_s"] - began_s < 25.0:
            tokens[one["flow"]] += one.get("output_tokens", 0)
    return [Check("share of the flow with a tenth of the clients", tokens["few"] / tokens.total(), 0.45, 0.55)]
