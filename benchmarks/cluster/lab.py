"""The same questions in virtual time: proxies that know nothing of each other, and as many that are a cluster.

    .venv/bin/python -m benchmarks.cluster.lab

Four simulated 8B replicas with 16 places each. Bands: a fifth of the work is critical, and there is more than the fleet
can do. Tenants: two with equal weights are backlogged, one of them four times as much, and each uses one proxy. The
network between proxies takes 0.5 ms for a round trip. Prints rows of Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmproxy.config import Config
from llmproxy.core.domain import Outcome
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import ProxyCluster, SimulatedFleet
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.result import RunResult
from llmproxy.lab.run.replay import Run, Setup
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces import trace_named
from llmproxy.lab.traces.arrival import Arrival, Trace

LASTS_S = 60.0
BANDS = f"gen:priority_mix,rate=25,duration_s={LASTS_S:g},prompt_tokens=1000,shared_tokens=500,output_tokens=512"
COUNTS = 2, 4, 8
DIES_AT_S = 20.0


def tenants() -> Iterator[Arrival]:
    """All at once: 1,200 requests of one tenant, 300 of another one, in turns."""
    for number in range(1_500):
        yield Arrival(0.0, 500, 100, tenant="b" if number % 5 == 4 else "a")


def played(trace: Trace, fleet: SimulatedFleet, seed: int) -> tuple[RunResult, list[Record]]:
    """One run, and its requests in the order of their ends."""
    settings = {"queue": {"max_wait_s": 600.0}, "scheduling": {"flow": "tenant"}} if trace.name == "tenants" else {}
    config = Config.model_validate({"backends": [{"url": "http://a:1"}], **settings})
    records: list[Record] = []
    setup = Setup(trace, fleet, plan_named("cost", config), config, seed, 1.0, LASTS_S, ())
    one = Run(setup, on_record=records.append)
    recorder = run(one.go())
    return recorder.result("cost", seed, 1.0, 1.0), records


def row(kind: str, fleet: SimulatedFleet, seeds: range) -> str:
    """Means over the seeds, and the worst of what should be 0."""
    goodput, p99, inversions, shares, failed = [], [], 0, [], 0
    for seed in seeds:
        bands, records = played(trace_named(BANDS, seed), fleet, seed)
        critical = bands.by_band["critical"]
        goodput.append(critical.goodput or 0.0)
        p99.append(critical.ttft_s.p99 or 0.0)
        inversions += bands.inversions
        failed += sum(one.outcome in (Outcome.CONNECT_FAILED, Outcome.BROKEN_STREAM) for one in records)
        _, records = played(Trace("tenants", tenants), replace(fleet, pinned=True), seed)
        served = [one.arrival.tenant for one in records if one.outcome is Outcome.COMPLETED]
        both = served[: len(served) - served[::-1].index("b")] if "b" in served else served
        shares.append(both.count("a") / len(both))
    mean = len(seeds)
    return (
        f"| {kind} | {sum(goodput) / mean:.3f} | {sum(p99) / mean:.2f} s | {inversions} | {sum(shares) / mean:.2f} "
        f"| {failed} |"
    )


def main() -> None:
    base = fleet_named("4xllama-8b-h100")
    base = replace(base, replicas=tuple(replace(one, max_num_seqs=16) for one in base.replicas))
    print("| proxies | critical goodput | critical TTFT p99 | inversions | share of tenant a | cut off |")
    print("| --- | --- | --- | --- | --- | --- |")
    seeds = range(1, 4)
    print(row("1", base, seeds), flush=True)
    for count in COUNTS:
        print(row(f"{count} strangers", replace(base, proxies=count), seeds), flush=True)
    for count in COUNTS:
        print(row(f"{count}, a cluster", replace(base, proxies=count, cluster=ProxyCluster()), seeds), flush=True)
    dies = ProxyCluster(leader_dies_at_s=DIES_AT_S)
    print(row("4, a cluster; the leader dies", replace(base, proxies=4, cluster=dies), seeds), flush=True)


if __name__ == "__main__":
    main()
