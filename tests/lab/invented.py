"""Runs that never happened, with figures that could: what tables and reports are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pydantic import JsonValue

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Outcome
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.recorder import RunRecorder
from llmproxy.lab.results.result import Bound, RunResult, SimulationResult, load_label
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.baselines.baseline_world import NAMES

DURATION_S = 600.0
REPLICAS = 8
TWELVE = ("blend", "late_least_request", *NAMES, "oracle")


def invented_run(
    policy: str,
    rate: float,
    *,
    seed: int = 1,
    skill: float = 0.5,
    tenants: int = 5,
    count: int = 400,
) -> RunResult:
    """A run of `count` requests. Figures improve with `skill`, 0..1, and worsen with `rate`. Skill 0 completes none."""
    rng = Random(f"{policy} {rate} {seed}")
    names = [f"gpu-{i:02d}" for i in range(REPLICAS)]
    recorder = RunRecorder(DURATION_S, names)
    late = policy.startswith(("blend", "late", "oracle"))
    for i in range(count):
        at_s = i * DURATION_S / count
        stress = rate * (1.3 - skill) * (1.6 if 200 < at_s < 320 else 1.0)
        recorder.add(_record(rng, at_s, stress, skill, names, tenants, late))
    for i in range(121):
        at_s = i * DURATION_S / 120
        load = {name: (rng.randint(0, int(40 * rate)), rng.randint(0, int(4 * rate))) for name in names}
        recorder.sample(at_s, load, {DEFAULT: int(10 * rate)})
    return recorder.result(policy, seed, rate, 1.0)


def _record(
    rng: Random, at_s: float, stress: float, skill: float, names: Sequence[str], tenants: int, late: bool
) -> Record:
    prompt_tokens = int(rng.lognormvariate(7.5, 1.0)) + 1
    tenant = f"tenant-{min(int(rng.expovariate(0.25)), tenants - 1)}"
    arrival = Arrival(at_s, prompt_tokens, rng.randint(1, 500), tenant=tenant)
    band = rng.choices([CRITICAL, DEFAULT, SHEDDABLE], [1, 3, 1])[0]
    record = Record(arrival, at_s, band, attempts=1, ended_s=at_s)
    if skill == 0.0 or rng.random() < 0.1 * (stress - 0.8):
        record.outcome = rng.choice([Outcome.REJECTED_CAPACITY, Outcome.EXPIRED, Outcome.SHED])
        return record
    crowded = rng.random() < 0.3
    record.backend = names[min(int(rng.expovariate(1.0 + skill)), REPLICAS - 1) if crowded else int(at_s) % REPLICAS]
    record.queue_wait_s = rng.expovariate(4.0 / stress) * (1 - band / 150) if late else 0.0
    record.ttft_s = 0.05 + record.queue_wait_s + rng.lognormvariate(-2.0 + stress, 0.8)
    record.hit_tokens = int(prompt_tokens * rng.random() * 0.5 * skill)
    record.output_tokens = arrival.output_tokens
    if record.output_tokens > 1:
        record.tpot_s = rng.lognormvariate(-4.3 + 0.4 * stress, 0.3)
    record.ended_s = at_s + record.ttft_s + record.output_tokens * (record.tpot_s or 0.0)
    record.outcome = Outcome.COMPLETED
    record.met = record.ttft_s < 1.0 and (record.tpot_s or 0.0) < 0.04
    return record


def invented(
    policies: Sequence[str] = TWELVE,
    rates: Sequence[float] = (0.7, 1.0, 1.5),
    *,
    seeds: int = 1,
    tenants: int = 5,
    count: int = 400,
) -> SimulationResult:
    """A result: `policies`, the better the earlier in the list, at all `rates`."""
    runs = []
    for rate in rates:
        for rank, policy in enumerate(policies):
            for seed in range(1, seeds + 1):
                skill = 0.95 if policy == "oracle" else 0.9 - 0.7 * rank / len(policies)
                runs.append(invented_run(policy, rate, seed=seed, skill=skill, tenants=tenants, count=count))
    bounds = {
        "hit_pooled_lru": Bound(
            value=0.331,
            unit="share",
            about="One cache as large as all replicas' together, least recently used out first.",
        ),
        "ttft_p99_s": Bound(
            value=0.412, unit="s", about="One queue in front of one server as fast as all replicas together."
        ),
    }
    config: dict[str, JsonValue] = {
        "trace": "conversation.jsonl",
        "fleet": f"{REPLICAS}xllama-8b-h100",
        "seeds": list(range(1, seeds + 1)),
        "requests": count,
        "scheduling": {"fairness": "drr", "placement": "blend", "ceilings": {"default": 1.0, "sheddable": 0.8}},
    }
    return SimulationResult(runs=runs, bounds={load_label(rate, 1.0): bounds for rate in rates}, config=config)
