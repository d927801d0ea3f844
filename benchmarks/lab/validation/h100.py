"""The engine model against published runs of one H100. Nothing here is tuned, and misses are printed.

    python -m benchmarks.lab.validation.h100

The runs are of Llama-3.1-8B under vLLM 0.11, measured with inference-perf for a talk at KubeCon NA 2025 (Apache-2.0).
The figures used here are in `benchmarks/traces/h100_llama31_8b_vllm011.csv`: four configurations under seven loads.
Each load is replayed with its own mean lengths, 10 prefixes of 128 tokens and some 75 tokens more.

Stages with a TTFT p50 above 1 s show a full engine. The bounded number of clients of that load generator held these
stages back, as their nearly equal TTFT p50 and p99 show. They are replayed in a closed loop. Little's law gives the
number of clients: rate x mean time of a request. Their rate is a prediction. All other stages have Poisson arrivals
at the achieved rate.

The two configurations without a prefix cache are the known gap of the model and have no band. They are also shown
with a prompt token that costs 1.9 times as much. The step overhead was once chosen on the time per output token of
`vllm+chunking_and_prefix_caching`: this column is a fit, and all others are predictions. `vllm+quantization` shows
the same times and serves as a repetition. Engines plan no step ahead here, as vLLM 0.11 did not by default.

Bands were drawn around the first results, so that a later change of the model does not pass unseen. The command takes
about two minutes on two cores. Its exit status is 1 when a figure is outside its band.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks.lab.validation.replayed import Check, percentile, print_table, report_broken, trace_of
from llmproxy.config import load
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import Setup, records_of
from llmproxy.lab.traces.arrival import Arrival, Trace

PUBLISHED = Path(__file__).resolve().parents[2] / "traces" / "h100_llama31_8b_vllm011.csv"
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


def main() -> int:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return report_broken(engine_part(pool))


if __name__ == "__main__":
    sys.exit(main())
