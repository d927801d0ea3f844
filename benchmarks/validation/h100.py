"""The engine model and the laboratory against published runs of real GPUs. Nothing here is tuned: misses are printed.

**One H100.** Llama-3.1-8B under vLLM 0.11, measured with inference-perf for a talk at KubeCon NA 2025 (Apache-2.0);
what is needed of it is in `benchmarks/traces/h100_llama31_8b_vllm011.csv`: four configurations under seven loads, each
replayed with its own mean lengths, 10 prefixes of 128 tokens and some 75 tokens more. Stages whose TTFT shows a full
engine (p50 above 1 s) were held back by that load generator's bounded number of clients, as their nearly equal TTFT p50
and p99 show; they are replayed in a closed loop of as many clients as Little's law finds in the published figures (rate
x mean time of a request), and their rate is a prediction. The others have Poisson arrivals at the rate achieved. The
two configurations without a prefix cache are the known gap of the model and have no band; they are also shown with a
prompt token that costs 1.9 times as much. The step overhead was once chosen on the time per output token of
`vllm+chunking_and_prefix_caching`: that column is a fit, all others are predictions. `vllm+quantization` shows the same
times and serves as its repetition.

**b2b knees.** llm-d's b2b benchmark, Qwen3-32B on 8 x 2 H100: 150 prefixes of 6,000 tokens, 5 users each, questions of
1,200 tokens, answers of 1,000. Its published knees are 38 requests per second of its ramp (between its stages of 35 and
40) for a scheduler that knows prefixes and 18 (15 and 20) for a plain service, at 90,000 and 45,000 prompt tokens per
second: 1.56 and 0.78 requests per second and pod. `cache_aware` and `round_robin` stand for the two. The published one
was llm-d's own sticky scheduler, version and flow control unknown; `epp_sticky` has no band for that reason. The stages
last only 20 to 38 s, about as long as one answer, and inference-perf waits for all answers before the next stage and
counts that time in; so the ramp is replayed like that, with a long pause after each stage. A stage is good when at
least 90 % of its requests have their first token within 2 s.

**Steady knees** answer what a capacity planner requests: the largest Poisson rate at which 90 % of the requests of the
second half of 400 s have their first token within 2 s, found by bisection to 3 %, each rate with three seeds of which
two must agree. Nobody published them; beside them stands a static balance of work (1.70 and 0.85 a pod, 1.56 and 0.67
with the dearer prompt tokens).

**Ranking.** Published for four schedulers of llm-d on this traffic: precise index of cached blocks, approximate index,
load alone, random. `dynamo_cost`, which hears the engines' KV events but weighs them in its own way, `epp_blend`,
`least_request` and `random` stand for them, over the whole ramp; which stages the published sums cover is not known.

Engines here plan no step ahead, as vLLM 0.11 did not by default.

Bands were drawn around the first results, so that a later change of the model does not pass unseen. The command takes
about five minutes on two cores; its exit status is 1 when a band is broken:

    python -m benchmarks.validation.h100
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks.validation.replayed import Check, percentile, print_table, report_broken, trace_of
from llmproxy.config import load
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import Setup, records_of
from llmproxy.lab.traces import trace_named
from llmproxy.lab.traces.arrival import Arrival, Trace
from llmproxy.lab.traces.generators import B2B_STAGES

PUBLISHED = Path(__file__).resolve().parents[1] / "traces" / "h100_llama31_8b_vllm011.csv"
SEED = 1
DEARER = 1.9


def _replayed(
    trace: Trace, fleet: SimulatedFleet, policy: str, seconds: float, seed: int, prefill_scale: float
) -> list[Record]:
    # The published clients waited for as long as it took.
    config = load(None, [])
    config = config.model_copy(update={"queue": config.queue.model_copy(update={"max_wait_s": 86_400.0})})
    fleet = replace(fleet, replicas=tuple(replace(spec, async_scheduling=False) for spec in fleet.replicas))
    return records_of(Setup(trace, fleet, plan_named(policy, config), config, seed, prefill_scale, seconds, ()))


# --- one H100 ---------------------------------------------------------------------------------------------------------

PREFIXES, PREFIX_TOKENS, BLOCK_TOKENS = 10, 128, 16
STAGE_S = 75.0
REQUESTS_MIN = 500
FILLING_S = 15.0
"""Not counted at the start of a stage: the batch, and in a closed loop the order of its clients, is not settled yet."""
FULL_TTFT_S = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """How a published configuration ran its engine. `batch` is its max-num-seqs: the number at which it levels out."""

    batch: int
    cached: bool


CONFIGURATIONS = {
    "vllm+chunking_and_prefix_caching": Served(128, cached=True),
    "vllm+quantization": Served(128, cached=True),
    "vllm": Served(128, cached=False),
    "vllm+batch_size": Served(192, cached=False),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the published figures."""

    config: str
    number: int
    rate: float
    prompt_tokens: float
    output_tokens: float
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    tpot_s: float
    running: float

    @property
    def full(self) -> bool:
        return self.ttft_p50_s > FULL_TTFT_S

    @property
    def seconds(self) -> float:
        return max(STAGE_S, FILLING_S + REQUESTS_MIN / self.rate)


@dataclass(frozen=True, slots=True)
class Measured:
    """The same figures of a replay."""

    rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_s: float
    running: float


def published_stages() -> list[Stage]:
    with PUBLISHED.open(newline="") as file:
        return [
            Stage(
                row["config"], int(row["stage"]), float(row["achieved_rps"]), float(row["prompt_mean"]),
                float(row["output_mean"]), float(row["ttft_p50_s"]), float(row["ttft_p99_s"]), float(row["e2e_mean_s"]),
                float(row["tpot_derived_ms"]) / 1e3, float(row["concurrency_decode"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def _request(stage: Stage, rng: Random, at_s: float) -> Arrival:
    def around(mean: float) -> int:
        return int(mean) + (rng.random() < mean - int(mean))

    per_prefix = PREFIX_TOKENS // BLOCK_TOKENS
    first = rng.randrange(PREFIXES) * per_prefix
    blocks = tuple(range(first, first + per_prefix)) if CONFIGURATIONS[stage.config].cached else ()
    return Arrival(at_s, around(stage.prompt_tokens), around(stage.output_tokens), blocks)


def _arrivals(stage: Stage) -> Iterator[Arrival]:
    rng = Random(SEED)
    if not stage.full:
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(stage.rate)) < stage.seconds:
            yield _request(stage, rng, at_s)
        return
    clients = round(stage.rate * stage.e2e_mean_s)
    # Some more turns than the published clients had time for, because the replay may be faster.
    turns = round(1.5 * stage.seconds / stage.e2e_mean_s)
    for number in range(clients):
        turn: Arrival | None = None
        for _ in range(turns):
            turn = replace(_request(stage, rng, number / stage.rate), then=turn)
        assert turn is not None
        yield turn


def simulated(stage: Stage, prefill_scale: float) -> Measured:
    """Replay one stage on one replica."""
    fleet = fleet_named("1xllama-8b-h100")
    spec = replace(fleet.replicas[0], max_num_seqs=CONFIGURATIONS[stage.config].batch)
    trace = trace_of(f"{stage.config} {stage.number}", list(_arrivals(stage)), BLOCK_TOKENS)
    # No proxy was there, so nothing may wait in front of the engine.
    records = _replayed(trace, replace(fleet, replicas=(spec,)), "round_robin", stage.seconds, SEED, prefill_scale)
    counted = [one for one in records if FILLING_S <= one.ended_s < stage.seconds]
    ttfts = [one.ttft_s for one in counted if one.ttft_s is not None]
    tpot_s = fmean(one.tpot_s for one in counted if one.tpot_s is not None)
    rate = len(counted) / (stage.seconds - FILLING_S)
    answering_s = fmean(one.ended_s - one.arrived_s for one in counted) - fmean(ttfts)
    return Measured(rate, percentile(ttfts, 0.5), percentile(ttfts, 0.99), tpot_s, rate * answering_s)


def compare_stage(stage: Stage, prefill_scale: float, found: Measured) -> tuple[list[Check], list[str]]:
    """The checks of one stage, and its row of the table.

    At 0.97 of the capacity the TTFT is a queue that depends on how even the arrivals were, which is not published.
    """
    name = f"{stage.config}, stage {stage.number}, prefill x{prefill_scale:g}"
    promised = CONFIGURATIONS[stage.config].cached and prefill_scale == 1.0
    near = not stage.full and stage.running > 0.9 * CONFIGURATIONS[stage.config].batch
    tpot = Check(f"{name}, TPOT", stage.tpot_s, found.tpot_s, 0.05 if promised else None)
    p50 = Check(f"{name}, TTFT p50", stage.ttft_p50_s, found.ttft_p50_s, 0.20 if promised and not near else None)
    p99 = Check(f"{name}, TTFT p99", stage.ttft_p99_s, found.ttft_p99_s, None)
    rate = Check(f"{name}, rate", stage.rate, found.rate, 0.05 if promised and stage.full else None)
    row = [str(stage.number), f"x{prefill_scale:g}", "closed" if stage.full else "Poisson"]
    for check, digits, scale in ((rate, 1, 1.0), (tpot, 2, 1e3), (p50, 1, 1e3), (p99, 1, 1e3)):
        compared = f"{scale * check.expected:.{digits}f} / {scale * check.found:.{digits}f} ({check.error:+.1%})"
        row.append(compared + " BROKEN" * check.broken)
    row.append(f"{stage.running:.1f} / {found.running:.1f}")
    return [rate, tpot, p50, p99], row


def engine_part(pool: ProcessPoolExecutor) -> list[Check]:
    stages = published_stages()
    tasks = [(s, scale) for s in stages for scale in ((1.0,) if CONFIGURATIONS[s.config].cached else (1.0, DEARER))]
    measured = list(pool.map(simulated, *zip(*tasks, strict=True)))
    checks = []
    for config, served in CONFIGURATIONS.items():
        rows = []
        for (stage, scale), found in zip(tasks, measured, strict=True):
            if stage.config == config:
                more, row = compare_stage(stage, scale, found)
                checks += more
                rows.append(row)
        cache = "prefix cache" if served.cached else "no prefix cache: the known gap, no band"
        print(f"{config}: max-num-seqs {served.batch}, {cache}; published / replayed (error)")
        head = ["stage", "prefill", "arrivals", "rate 1/s", "TPOT ms", "TTFT p50 ms", "TTFT p99 ms", "decoding"]
        print_table(head, rows)
    return checks


# --- b2b --------------------------------------------------------------------------------------------------------------

PODS = 8
FLEET = f"{PODS}xqwen-32b-h100-tp2"
GOOD_TTFT_S, GOOD_SHARE = 2.0, 0.9
PAUSE_S = 400.0
RAMP_UP_TO = 46
PROMPT_TOKENS = 7_200
RAMP_POLICIES = ("cache_aware", "epp_sticky", "dynamo_cost", "epp_blend", "round_robin", "least_request", "random")
RAMP_KNEES = {"cache_aware": (35, 90_000.0), "epp_sticky": (35, 90_000.0), "round_robin": (15, 45_000.0)}
"""Last good stage and prompt tokens per second at the knee, as published."""
NO_BAND = "epp_sticky"
STEADY = {"cache_aware": (1.56, 1.70, 1.56), "round_robin": (0.78, 0.85, 0.67)}
"""Rates per pod: published knee, static balance of work, and the same with dearer prompt tokens."""
STEADY_S = 400.0
PRECISION = 1.03
RANKING_BAND = 0.2


@dataclass(frozen=True, slots=True)
class RampStage:
    """Share of good requests of one stage of the ramp, and prompt tokens per second until all are done."""

    rate: int
    good: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Ramp:
    """A whole ramp; `answer_tokens_per_s` counts only the time in which requests were under way."""

    policy: str
    stages: tuple[RampStage, ...]
    ttft_mean_s: float
    answer_tokens_per_s: float

    @property
    def last_good(self) -> int:
        """The rate of the last stage before the first bad one; 0 where the first is bad."""
        last = 0
        for stage in self.stages:
            if stage.good < GOOD_SHARE:
                break
            last = stage.rate
        return last

    @property
    def beyond(self) -> RampStage:
        """The first stage that is not good, where the fleet gives what it has; the last one where all are good."""
        return next((stage for stage in self.stages if stage.good < GOOD_SHARE), self.stages[-1])


def good_share(records: Sequence[Record]) -> float:
    """The share of requests whose first token came soon; one without any token did not."""
    return sum(one.ttft_s is not None and one.ttft_s <= GOOD_TTFT_S for one in records) / len(records)


def ramp(policy: str) -> Ramp:
    """Replay the ramp, its warm-up first, with a pause after each stage. RuntimeError where a pause is too short."""
    stages = [stage for number, stage in enumerate(B2B_STAGES) if number == 0 or stage[0] <= RAMP_UP_TO]
    ends_s = list(accumulate(span_s + PAUSE_S for _, span_s in stages))
    needed = sum(rate * span_s for rate, span_s in stages)
    rng, prompts = Random(SEED), trace_named(f"gen:shared_system_prompts,rate=100,duration_s={needed}", SEED)
    source, arrivals = prompts.arrivals(), []
    for (rate, span_s), end_s in zip(stages, ends_s, strict=True):
        start_s = end_s - PAUSE_S - span_s
        times_s = sorted(start_s + rng.uniform(0.0, span_s) for _ in range(rate * span_s))
        arrivals += [replace(next(source), at_s=at_s) for at_s in times_s]
    trace = trace_of("b2b ramp", arrivals, prompts.block_tokens)
    records = _replayed(trace, fleet_named(FLEET), policy, ends_s[-1], SEED, 1.0)
    found, busy_s = [], 0.0
    for (rate, span_s), end_s in list(zip(stages, ends_s, strict=True))[1:]:
        start_s = end_s - PAUSE_S - span_s
        mine = [one for one in records if start_s <= one.arrived_s < end_s]
        last_s = max(one.ended_s for one in mine)
        if last_s > end_s:
            raise RuntimeError(f"{policy} was still busy with the stage of {rate}/s when the next one began")
        busy_s += last_s - start_s
        found.append(RampStage(rate, good_share(mine), len(mine) * PROMPT_TOKENS / (last_s - start_s)))
    counted = [one for one in records if one.arrived_s >= ends_s[0]]
    ttft_mean_s = fmean(one.ttft_s for one in counted if one.ttft_s is not None)
    return Ramp(policy, tuple(found), ttft_mean_s, sum(one.output_tokens for one in counted) / busy_s)


def steady_knee(policy: str, prefill_scale: float) -> float:
    """Requests per second and pod, by bisection from two thirds to four thirds of what is expected.

    RuntimeError where the knee is not in there.
    """
    low, high = least, most = min(STEADY[policy]) * 2 / 3, max(STEADY[policy]) * 4 / 3
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _carries(policy, middle, prefill_scale) else (low, middle)
    if low == least or high == most:
        raise RuntimeError(f"the knee of {policy} is not between {least:.2f} and {most:.2f} a pod: widen the search")
    return low


def _carries(policy: str, per_pod: float, prefill_scale: float) -> bool:
    votes: list[bool] = []
    while max(votes.count(True), votes.count(False)) < 2:
        seed = SEED + len(votes)
        trace = trace_named(f"gen:shared_system_prompts,rate={per_pod * PODS:.4f},duration_s={STEADY_S}", seed)
        records = _replayed(trace, fleet_named(FLEET), policy, STEADY_S, seed, prefill_scale)
        votes.append(good_share([one for one in records if one.arrived_s >= STEADY_S / 2]) >= GOOD_SHARE)
    return votes.count(True) == 2


def fleet_part(pool: ProcessPoolExecutor) -> list[Check]:
    wanted = [(policy, scale) for policy in STEADY for scale in (1.0, DEARER)]
    knees = pool.map(steady_knee, *zip(*wanted, strict=True))
    ramps = list(pool.map(ramp, RAMP_POLICIES))
    checks = []
    head = ["policy", *(str(stage.rate) for stage in ramps[0].stages)]
    print("b2b ramp: share of requests with their first token within 2 s, by requests per second of the stage")
    print_table(head, [[one.policy, *(f"{s.good:.0%}" for s in one.stages)] for one in ramps])
    print("b2b ramp: thousands of prompt tokens per second, until the last answer of the stage")
    print_table(head, [[r.policy, *(f"{s.tokens_per_s / 1e3:.0f}" for s in r.stages)] for r in ramps])
    rows = []
    for policy, (last_good, tokens_per_s) in RAMP_KNEES.items():
        one = next(found for found in ramps if found.policy == policy)
        banded = policy != NO_BAND
        stage = Check(f"b2b ramp, {policy}, last good stage", last_good, one.last_good, 0.0 if banded else None)
        tokens = Check(f"b2b ramp, {policy}, tokens/s", tokens_per_s, one.beyond.tokens_per_s, 0.1 if banded else None)
        checks += [stage, tokens]
        compared = f"{tokens_per_s:,.0f} / {one.beyond.tokens_per_s:,.0f} ({tokens.error:+.1%})"
        rows.append([policy, f"{last_good} / {one.last_good}", stage.verdict, compared, tokens.verdict])
    print("b2b ramp: the last good stage, and prompt tokens per second of the one after it; published / replayed")
    print_table(["policy", "last good stage, 1/s", "", "prompt tokens/s", ""], rows)

    rows = []
    for (policy, scale), knee in zip(wanted, knees, strict=True):
        published, balance, dearer = STEADY[policy]
        static = balance if scale == 1.0 else dearer
        check = Check(f"steady knee, {policy}, prefill x{scale:g}", static, knee, None)
        checks.append(check)
        rows.append([policy, f"x{scale:g}", f"{knee:.2f}", f"{static:.2f} ({check.error:+.0%})",
                     f"{published:.2f} ({knee / published - 1:+.0%})"])  # fmt: skip
    print("b2b steady knees: requests per second and pod")
    print_table(["policy", "prefill", "knee", "static balance", "published ramp figure"], rows)
    return [*checks, *ranking(ramps)]


def ranking(ramps: Sequence[Ramp]) -> list[Check]:
    """The order of the stand-ins: each one's lead over the next."""
    published = {"dynamo_cost": (8_730, 0.298), "epp_blend": (6_944, 13.3), "least_request": (4_429, 47.0),
                 "random": (4_429, 45.3)}  # fmt: skip
    ramps_by_name = {one.policy: one for one in ramps}
    ran = {name: ramps_by_name[name] for name in published}
    checks = []
    for (better, (more, _)), (worse, (less, _)) in pairwise(published.items()):
        lead = ran[better].answer_tokens_per_s / ran[worse].answer_tokens_per_s
        checks.append(Check(f"ranking, lead of {better} over {worse}", more / less, lead, RANKING_BAND))
    rows = [
        [name, f"{tokens:,} / {ran[name].answer_tokens_per_s:,.0f}", f"{ttft_s:g} / {ran[name].ttft_mean_s:.1f}"]
        for name, (tokens, ttft_s) in published.items()
    ]
    print("four schedulers on the ramp: precise index, approximate index, load alone, random; published / replayed")
    print_table(["stand-in", "answer tokens/s", "TTFT mean s"], rows)
    return checks


def main() -> int:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return report_broken([*engine_part(pool), *fleet_part(pool)])


if __name__ == "__main__":
    sys.exit(main())
