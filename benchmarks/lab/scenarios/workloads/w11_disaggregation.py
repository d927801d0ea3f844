"""W11: prompts and answers on replicas of their own. Which requests should be split?"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from benchmarks.lab.scenarios.scenario import GOODPUT, WARMUP, Beside, Case, Found, Goal, Scenario
from llmproxy.core.domain import Role
from llmproxy.lab.fleet.spec import SimulatedFleet

ALWAYS, NEVER = "cost(disaggregation=always)", "cost(disaggregation=never)"
PAIRED = ("cost", ALWAYS, NEVER, "vllm_router_pd", "llmd_pd", "dynamo_pd")
LENGTHS = "gen:step_bursts,factor=1,rate=15,duration_s=60,sigma=0.5"
BELOW_MOST = 0.01  # How much goodput `auto` may lose against the better of the fixed rules `always` and `never`.


def all_both(fleet: SimulatedFleet) -> SimulatedFleet:
    """Returns the same replicas without roles."""
    return replace(fleet, replicas=tuple(replace(spec, role=Role.BOTH) for spec in fleet.replicas))


def _ahead(least: float) -> Callable[[Found], list[Goal]]:
    """Returns a goal: by how much `auto` is better than the better fixed rule."""

    def goals(found: Found) -> list[Goal]:
        if not all(found.runs.get(policy) for policy in ("cost", ALWAYS, NEVER)):
            return []
        mean = {policy: fmean(run.goodput or 0.0 for run in found.runs[policy]) for policy in ("cost", ALWAYS, NEVER)}
        ahead = mean["cost"] - max(mean[ALWAYS], mean[NEVER])
        return [Goal("goodput of auto, less that of always or never", ahead, least)]

    return goals


def _case(name: str, trace: str, prefill: int, requests: int | None = None, least: float = -BELOW_MOST) -> Case:
    """Returns a case with eight replicas. `prefill` replicas compute only prompts.

    An additional run has the same replicas without roles.
    """
    return Case(
        f"{name}, {prefill} + {8 - prefill} x 8B",
        trace,
        f"{prefill}xllama-8b-h100:prefill+{8 - prefill}xllama-8b-h100:decode",
        (0.5, 0.75),
        requests=requests,
        policies=PAIRED,
        beside=(Beside("all both", "cost", reshaped=all_both, warmup=WARMUP),),
        goals=_ahead(least),
        quick=name == "mixed",
        quick_loads=(0.75,),
    )


SCENARIO = Scenario(
    "W11",
    "Prefill and decode apart",
    "Long prompts with short answers, short prompts with long answers, both mixed, chats and agents, on replicas for"
    " prompts and replicas for answers. `cost` splits requests that are cheaper in two stages. Beside it are the rules"
    " to split always and never, the rules of other routers, and the same replicas without roles.",
    GOODPUT,
    (
        _case("mixed", "gen:mixed_lengths,rate=20,duration_s=60", 3, least=0.0),
        _case("long prompts", f"{LENGTHS},prompt_tokens=8000,output_tokens=100", 5),
        _case("long answers", f"{LENGTHS},prompt_tokens=300,output_tokens=500", 2),
        _case("chat", "mooncake_conversation.jsonl.gz", 4, requests=700),
        _case("agents", "SYNTHETIC_toolagent_like.jsonl.gz", 4, requests=700),
    ),
)
