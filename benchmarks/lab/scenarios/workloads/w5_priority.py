"""W5: more work than the fleet can do, a fifth of it critical; is that fifth served as if it were alone?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.lab.scenarios.goals import full_step_s, in_band, mean, versus
from benchmarks.lab.scenarios.scenario import CRITICAL_GOODPUT, Beside, Case, Found, Goal, Scenario, sized
from llmproxy.lab.results.result import RunResult
from llmproxy.lab.traces.mix import Mix

if TYPE_CHECKING:
    from llmproxy.lab.results.plots import Plot

PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 1_000, 500, 512
TRACE = (
    f"gen:priority_mix,rate=25,duration_s=120,prompt_tokens={PROMPT_TOKENS},shared_tokens={SHARED_TOKENS},"
    f"output_tokens={OUTPUT_TOKENS}"
)
LEARNED_IN_S = 10.0
"""From then on learned limits are to be as good as given ones."""
ALONE = Beside("critical alone", "cost", Mix(band="critical"))
LEVEL = Beside("all bands equal, fcfs", "cost(fairness=fcfs,ceilings=1/1/1)", Mix(level=True))
CEILINGS = (0.6, 0.7, 0.8, 0.9, 1.0)
FRONTIER = {ceiling: f"cost(ceilings=1/{ceiling:g}/{ceiling:g})" for ceiling in CEILINGS} | {1.0: "cost(headroom_s=0)"}
NO_ROOM = ("epp_blend", "least_request", "round_robin")
"""The endpoint picker's gate, no queue in front of the engines, and engines in turn: vLLM's own order of arrival."""

critical_ttft_p99 = in_band("critical", lambda group: group.ttft_s.p99)


def tokens_per_s(run: RunResult) -> float | None:
    """Output tokens of all bands while the traffic lasts."""
    return run.loaded.output_tokens_per_s or None


def of_band_per_s(run: RunResult, band: str) -> float:
    """Output tokens of one band while the traffic lasts."""
    return run.loaded.output_tokens.get(band, 0) / run.loaded.duration_s if run.loaded.duration_s else 0.0


def left_over(run: RunResult, of: RunResult) -> float | None:
    """What default got in `run`, over the lesser of what it asked for and what `of` did beyond `run`'s critical."""
    span_s = run.loaded.duration_s
    if not span_s or "default" not in run.by_band:
        return None
    asked = run.by_band["default"].offered * OUTPUT_TOKENS / span_s
    left = of.loaded.output_tokens_per_s - of_band_per_s(run, "critical")
    return of_band_per_s(run, "default") / min(asked, left) if min(asked, left) > 0 else None


def goals(found: Found) -> list[Goal]:
    """What a critical request was promised, and what that may cost the others."""
    place, ours, alone, level = found.place, found.runs["cost"], found.beside[ALONE.name], found.beside[LEVEL.name]
    step_s = full_step_s(place, PROMPT_TOKENS, PROMPT_TOKENS - SHARED_TOKENS, PROMPT_TOKENS + OUTPUT_TOKENS // 2)
    solo_s = mean(alone, critical_ttft_p99)
    of_fcfs = [left_over(run, other) or 0.0 for run in ours for other in level if run.seed == other.seed]
    judged = [
        Goal("critical goodput / alone", versus(ours, alone, CRITICAL_GOODPUT.of), 0.995),
        Goal(
            "critical TTFT p99, s",
            mean(ours, critical_ttft_p99),
            (solo_s or 0.0) + 2 * step_s,
            at_least=False,
            about=f"alone {solo_s or 0.0:.3f} + 2 full steps of {step_s:.3f}",
        ),
        Goal("inversions", float(sum(run.inversions for run in ours)) if ours else None, 0.0, at_least=False),
        Goal("output tokens/s / fcfs", versus(ours, level, tokens_per_s), 0.95),
        Goal(
            "default / what is left",
            mean(ours, lambda run: left_over(run, run)),
            0.97,
            about=f"of what fcfs would leave: {sum(of_fcfs) / max(1, len(of_fcfs)):.3f}",
        ),
    ]
    if place.load is not None and place.load < 1.0:
        judged.append(
            Goal("sheddable completed", mean(ours, in_band("sheddable", lambda g: g.completed / g.offered)), 0.99)
        )
    return judged


def frontier(all_found: Sequence[Found]) -> list[Plot]:
    """Ceiling against throughput against the first token of critical requests, one panel for each cost of a prompt."""
    from llmproxy.lab.results.drawing import MUTED, SERIES, new_figure
    from llmproxy.lab.results.plots import Plot

    figure = new_figure(3.6)
    axes = figure.subplots(1, len(all_found), squeeze=False)[0]
    for panel, found in zip(axes, all_found, strict=True):
        level = found.beside[LEVEL.name]
        other = panel.twinx()
        for policy in FRONTIER.values():
            assert policy in found.runs
        shares = [versus(found.runs[policy], level, tokens_per_s) for policy in FRONTIER.values()]
        waits = [mean(found.runs[policy], critical_ttft_p99) for policy in FRONTIER.values()]
        panel.plot(CEILINGS, [share or float("nan") for share in shares], color=SERIES[0], marker="o")
        other.plot(CEILINGS, [wait or float("nan") for wait in waits], color=SERIES[1], marker="s")
        alone_s = mean(found.beside[ALONE.name], critical_ttft_p99)
        if alone_s is not None:
            other.axhline(alone_s, color=MUTED, linestyle=":", linewidth=1.0)
        panel.set_title(f"load {found.place.load:g}, prefill x{found.place.prefill_scale:g}", loc="left")
        panel.set_xlabel("ceiling of default and sheddable")
        panel.set_ylabel("output tokens/s over fcfs (circles)", color=SERIES[0])
        other.set_ylabel("critical TTFT p99, s (squares)", color=SERIES[1])
        other.set_ylim(bottom=0.0)
        other.grid(visible=False)
    caption = (
        "What a ceiling for the lower bands costs and buys. Dotted: critical requests alone on the fleet. Policies"
        " without ceilings are in the tables."
    )
    return [Plot("Ceilings: throughput against the first token of critical requests", caption, figure)]


SCENARIO = Scenario(
    "W5",
    "Priorities in overload",
    "20 % critical, 60 % default, 20 % sheddable, of one kind otherwise, up to twice what the fleet can do;"
    " beside it the critical requests of the same trace alone, at the same times, and all of them in one band. Batch"
    " limits are learned from the engines' gauges, or configured.",
    CRITICAL_GOODPUT,
    (
        Case(
            "20/60/20, 2 x 8B",
            TRACE,
            "2xllama-8b-h100",
            (0.7, 1.0, 1.5, 2.0),
            shape=sized(max_num_seqs=64),
            policies=("cost", *NO_ROOM, "oracle"),
            beside=(ALONE, LEVEL),
            goals=goals,
            quick_loads=(2.0,),
            warmup_s=LEARNED_IN_S,
        ),
        Case(
            "20/60/20, limits given, 2 x 8B",
            TRACE,
            "2xllama-8b-h100",
            (0.7, 1.0, 1.5, 2.0),
            shape=sized(max_num_seqs=64),
            known_limits=True,
            policies=("cost",),
            beside=(ALONE, LEVEL),
            goals=goals,
            quick_loads=(2.0,),
            warmup_s=LEARNED_IN_S,
        ),
        Case(
            "ceilings, 2 x 8B",
            TRACE,
            "2xllama-8b-h100",
            (1.5,),
            shape=sized(max_num_seqs=64),
            known_limits=True,
            policies=("cost", *FRONTIER.values(), *NO_ROOM),
            beside=(ALONE, LEVEL),
            plots=frontier,
            quick=False,
        ),
    ),
)
