"""W5b: single critical requests while a flood of sheddable ones fills small batches. How long do they wait?"""

from __future__ import annotations

from benchmarks.lab.scenarios.goals import in_band, mean, of_tenant
from benchmarks.lab.scenarios.scenario import Beside, Case, Found, Goal, Metric, Scenario, sized
from llmproxy.lab.results.result import GroupResult
from llmproxy.lab.traces.mix import Mix

SEQUENCES = 8
FIRST_S = 10.0
EVERY_S = (0.5, 0.15)
BEGINNINGS = {"flood first": (15.0, 0.0), "critical first": (0.0, 15.0)}
"""When critical traffic and the flood begin, in seconds. No capacity is reserved for a band without requests."""
ALONE = Beside("critical alone", "cost", Mix(band="critical"), warmup=0.0)
WANTED, WANTED_WHILE_LEARNING = 1.6, 3.0
"""The wanted TTFT p95, as a multiple of the TTFT p95 of the critical requests alone."""


def ttft_p50(group: GroupResult) -> float | None:
    """Returns the median time to the first token of a group of requests in seconds; None without a token."""
    return group.ttft_s.p50


def ttft_p95(group: GroupResult) -> float | None:
    """Returns the p95 of the time to the first token of a group of requests in seconds; None without a token."""
    return group.ttft_s.p95


def goals(found: Found) -> list[Goal]:
    """Returns the goals for the first token of critical requests, with and without the flood.

    The first seconds and the later time have separate goals.
    """
    ours, alone = found.runs["cost"], found.beside[ALONE.name]
    solo_p50_s, solo_p95_s = (mean(alone, in_band("critical", figure)) for figure in (ttft_p50, ttft_p95))
    judged = []
    for tenant, when in (("first", f"first {FIRST_S:g} s"), ("after", "after that")):
        p50_s, p95_s = (mean(ours, of_tenant(tenant, figure)) for figure in (ttft_p50, ttft_p95))
        ratio = None if p95_s is None or not solo_p95_s else p95_s / solo_p95_s
        wanted = WANTED if found.place.case.known_limits or tenant == "after" else WANTED_WHILE_LEARNING
        about = f"p50/p95 {_ms(p50_s)}/{_ms(p95_s)} ms, alone {_ms(solo_p50_s)}/{_ms(solo_p95_s)}"
        judged.append(Goal(f"critical TTFT p95 / alone, {when}", ratio, wanted, at_least=False, about=about))
    return judged


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _case(known: bool, every_s: float, order: str) -> Case:
    critical_from_s, flood_from_s = BEGINNINGS[order]
    return Case(
        f"{'given' if known else 'learned'}, every {every_s:g} s, {order}",
        f"gen:critical_and_flood,every_s={every_s:g},critical_from_s={critical_from_s:g},flood_from_s={flood_from_s:g},"
        f"first_s={FIRST_S:g}",
        "2xllama-8b-h100",
        (None,),
        shape=sized(max_num_seqs=SEQUENCES),
        known_limits=known,
        policies=("cost",),
        beside=(ALONE,),
        goals=goals,
        warmup=0.0,
    )


SCENARIO = Scenario(
    "W5b",
    "First tokens above a flood",
    f"Two replicas of {SEQUENCES} sequences, 240 sheddable requests at once, and a short critical request every 0.5 s"
    " or 0.15 s. Batch limits are given or learned. The flood or the critical traffic comes first."
    " Beside it the critical requests alone.",
    Metric("critical TTFT p95 in s", in_band("critical", ttft_p95), higher=False),
    tuple(_case(known, every_s, order) for known in (True, False) for every_s in EVERY_S for order in BEGINNINGS),
)
