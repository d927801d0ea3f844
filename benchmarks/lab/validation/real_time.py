"""Does a replay in virtual time show what the same requests meet in real time, over HTTP, through the whole proxy?

One list of arrivals, twice. Once through `llmproxy serve` in front of `llmproxy replica` processes, with a client that
sends every request at its moment and reads the stream: everything a token passes in production but the GPU. And once
through the laboratory, with several seeds, whose spread says how far two equal runs lie apart.

The replicas run at a fifth of real speed, so that some milliseconds of this machine's scheduling noise are a fifth of
that in the world that is measured. The proxy's own times are stretched by the same factor (polls, staleness, backoff,
timeouts), so that both proxies live in equal virtual seconds. Constants of the code cannot be stretched and are five
times as short in the real run: GAUGE_LAG_S of the core (30 ms, how far gauges trail), HEALTH_INTERVAL_S of the poller
(1 s) and the replica's own _LAG_MAX_S (50 ms). STARTED_AFTER_S is for answers without a stream, which are not sent.

Prompts go to `/v1/completions`, where a simulated replica makes one token of every four bytes: prompt tokens are equal
to the byte in both worlds. The laboratory's prompts have a scatter of bytes per token that these have not; it touches
nothing but the estimate of a prompt's share of the KV-cache, which is far from full here. The real requests carry
`max_tokens`, which their proxy may read; it changes what a flow is charged, and there is one flow.

Two cases: one below the fleet's capacity, for the latencies, and one above it, where throughput is the capacity. Times
are virtual seconds. `throughput` counts answers that ended from a third of the arrivals' time to their last moment.
Run it on a machine that does nothing else:

    python -m benchmarks.lab.validation.real_time

It takes about six minutes and exits with 1 when a figure is outside its band: throughput and TTFT p50 5 %, TTFT p99
10 %. `laboratory` is the mean over its seeds, `seeds` the least and the most of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

import aiohttp

from benchmarks.fleet import Fleet as Processes
from benchmarks.fleet import fleet as processes
from benchmarks.lab.validation.replayed import Check, percentile, print_table, report_broken, trace_of
from llmproxy.config import Config, load
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.policies.by_name import own_name, plan_named
from llmproxy.lab.run.replay import SETTLE_S, Setup, records_of
from llmproxy.lab.simulator.server.text import TOKEN_BYTES
from llmproxy.lab.traces.arrival import Arrival

MODEL = "sim"
PROFILE = "llama-8b-h100"
SPEED = 0.2
REPLICAS = 3
BATCH = 16
MODEL_LEN = 32_768
BLOCK_TOKENS = 16
HEADS, HEAD_TOKENS = 8, 512
TAIL_TOKENS = (64, 1_024)
OUTPUT_TOKENS = (16, 112)
LAB_SEEDS = range(1, 9)
LOAD_AVERAGE_MAX = 1.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
STRETCHED = (
    "poll.interval_s", "poll.page_interval_s", "poll.models_interval_s", "poll.timeout_s", "poll.stale_after_s",
    "queue.max_wait_s", "timeouts.connect_s", "timeouts.first_byte_s", "timeouts.stall_s", "timeouts.total_s",
    "health.ejection_s", "health.ejection_max_s",
)  # fmt: skip
"""Every key of the configuration that is a time and means something while requests are served."""


@dataclass(frozen=True, slots=True)
class Case:
    """Poisson arrivals of `rate` per second for `seconds`, both virtual."""

    name: str
    rate: float
    seconds: float


CASES = (Case("below capacity", 50.0, 45.0), Case("above capacity", 100.0, 15.0))


@dataclass(frozen=True, slots=True)
class Ended:
    """One request as its client saw it, in virtual seconds; `ended_s` counts from the first moment of the trace."""

    backend: str
    arrived_s: float
    ended_s: float
    ttft_s: float
    tpot_s: float
    queue_wait_s: float
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table; `band` is the relative error that is allowed, None where none is promised."""

    name: str
    of: Callable[[Sequence[Ended], Case], float]
    band: float | None = None


def _throughput(ended: Sequence[Ended], case: Case) -> float:
    first_s = case.seconds / 3
    return sum(first_s <= one.ended_s < case.seconds for one in ended) / (case.seconds - first_s)


def _shares(ended: Sequence[Ended]) -> list[float]:
    return [count / len(ended) for count in Counter(one.backend for one in ended).values()]


FIGURES = (
    Figure("throughput, 1/s", _throughput, 0.05),
    Figure("TTFT mean, s", lambda ended, _: fmean(one.ttft_s for one in ended)),
    Figure("TTFT p50, s", lambda ended, _: percentile([one.ttft_s for one in ended], 0.5), 0.05),
    Figure("TTFT p99, s", lambda ended, _: percentile([one.ttft_s for one in ended], 0.99), 0.10),
    Figure("TPOT mean, ms", lambda ended, _: 1e3 * fmean(one.tpot_s for one in ended)),
    Figure("TPOT p50, ms", lambda ended, _: 1e3 * percentile([one.tpot_s for one in ended], 0.5)),
    Figure("TPOT p99, ms", lambda ended, _: 1e3 * percentile([one.tpot_s for one in ended], 0.99)),
    Figure("queue wait mean, s", lambda ended, _: fmean(one.queue_wait_s for one in ended)),
    Figure("queue wait p50, s", lambda ended, _: percentile([one.queue_wait_s for one in ended], 0.5)),
    Figure("queue wait p99, s", lambda ended, _: percentile([one.queue_wait_s for one in ended], 0.99)),
    Figure("TTFT less queue wait p50, s", lambda e, _: percentile([one.ttft_s - one.queue_wait_s for one in e], 0.5)),
    Figure("TTFT less queue wait p99, s", lambda e, _: percentile([one.ttft_s - one.queue_wait_s for one in e], 0.99)),
    Figure("largest replica's share", lambda ended, _: max(_shares(ended))),
    Figure("smallest replica's share", lambda ended, _: min(_shares(ended))),
    Figure("hit tokens per request", lambda ended, _: fmean(one.hit_tokens for one in ended)),
)


def arrivals_of(case: Case, seed: int) -> list[Arrival]:
    """Prompts that begin with one of a few heads and go on with a text of their own."""
    rng = Random(seed)
    per_head = HEAD_TOKENS // BLOCK_TOKENS
    at_s, arrivals = 0.0, []
    while (at_s := at_s + rng.expovariate(case.rate)) < case.seconds:
        head = rng.randrange(HEADS)
        blocks = tuple(range(head * per_head, (head + 1) * per_head))
        arrivals.append(Arrival(at_s, HEAD_TOKENS + rng.randint(*TAIL_TOKENS), rng.randint(*OUTPUT_TOKENS), blocks))
    return arrivals


# --- in virtual time --------------------------------------------------------------------------------------------------


def virtual(case: Case, arrivals: Sequence[Arrival], seed: int) -> list[Ended]:
    """The requests through the laboratory. RuntimeError where one was not answered."""
    config = load(None, [])
    named = fleet_named(f"{REPLICAS}x{PROFILE}")
    specs = (replace(spec, max_num_seqs=BATCH, max_model_len=MODEL_LEN) for spec in named.replicas)
    trace = trace_of(case.name, arrivals, BLOCK_TOKENS)
    plan = plan_named(own_name(config), config)
    setup = Setup(trace, SimulatedFleet(named.name, tuple(specs)), plan, config, seed, 1.0, case.seconds, ())
    ended = []
    for record in records_of(setup):
        if record.ttft_s is None or record.tpot_s is None or record.queue_wait_s is None or record.backend is None:
            raise RuntimeError(f"a request ended as {record.outcome} in the laboratory; the case should answer all")
        ended.append(
            Ended(
                record.backend,
                record.arrived_s,
                record.ended_s,
                record.ttft_s,
                record.tpot_s,
                record.queue_wait_s,
                record.hit_tokens,
            )
        )
    return ended


# --- in real time -----------------------------------------------------------------------------------------------------


def stretched_flags(config: Config) -> list[str]:
    """The proxy's flags that make each of its times as much longer as the replicas are slower."""
    flags = []
    for key in STRETCHED:
        section, _, name = key.partition(".")
        seconds = getattr(getattr(config, section), name) / SPEED
        flags += [f"--{key.replace('.', '-').replace('_', '-')}", f"{seconds:g}"]
    return flags


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client's own clock saw of one answer, in real seconds from the first moment of the trace."""

    sent_s: float
    first_s: float
    ended_s: float


async def real(arrivals: Sequence[Arrival], seed: int) -> tuple[list[Ended], float]:
    """The requests through real processes, and the greatest lateness of a sending, in virtual seconds.

    RuntimeError where one was not answered.
    """
    replica_flags = [
        "--model", MODEL, "--profile", PROFILE, "--speed", str(SPEED), "--max-num-seqs", str(BATCH),
        "--max-model-len", str(MODEL_LEN), "--seed", str(seed),
    ]  # fmt: skip
    # Which texts they are is nobody's business but the tokenizer's, so heads and tails come from one generator.
    rng = Random(seed)
    heads = [_text(rng, HEAD_TOKENS) for _ in range(HEADS)]
    per_head = HEAD_TOKENS // BLOCK_TOKENS
    bodies = [
        _body(heads[arrival.blocks[0] // per_head] + _text(rng, arrival.prompt_tokens - HEAD_TOKENS), arrival)
        for arrival in arrivals
    ]
    async with processes([replica_flags] * REPLICAS, stretched_flags(load(None, []))) as running:
        await asyncio.sleep(SETTLE_S / SPEED)
        seen = await _send_all(running, arrivals, bodies)
        exits = {entry["request_id"]: entry for entry in running.exits()}
    late_s = max(SPEED * one.sent_s - arrival.at_s for one, arrival in zip(seen, arrivals, strict=True))
    return [_ended(one, exits[str(i)], a) for i, (one, a) in enumerate(zip(seen, arrivals, strict=True))], late_s


def _text(rng: Random, tokens: int) -> str:
    return "".join(rng.choices(LETTERS, k=tokens * TOKEN_BYTES))


def _body(prompt: str, arrival: Arrival) -> bytes:
    limits = {"max_tokens": arrival.output_tokens, "ignore_eos": True, "stream": True}
    return json.dumps({"model": MODEL, "prompt": prompt, **limits}).encode()


async def _send_all(running: Processes, arrivals: Sequence[Arrival], bodies: Sequence[bytes]) -> list[Seen]:
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        start_s = loop.time()
        tasks = []
        for number, (arrival, body) in enumerate(zip(arrivals, bodies, strict=True)):
            await asyncio.sleep(start_s + arrival.at_s / SPEED - loop.time())
            tasks.append(loop.create_task(_send(session, running.url, body, str(number), start_s)))
        return list(await asyncio.gather(*tasks))


async def _send(session: aiohttp.ClientSession, url: str, body: bytes, name: str, start_s: float) -> Seen:
    loop = asyncio.get_running_loop()
    sent_s, first_s = loop.time(), 0.0
    headers = {"content-type": "application/json", "x-request-id": name}
    async with session.post(url + "/v1/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the proxy answered {answer.status}: {(await answer.text())[:300]}")
        async for _ in answer.content.iter_any():
            first_s = first_s or loop.time()
    return Seen(sent_s - start_s, first_s - start_s, loop.time() - start_s)


def _ended(seen: Seen, line: dict[str, object], arrival: Arrival) -> Ended:
    if line["outcome"] != "completed" or line["output_tokens"] != arrival.output_tokens:
        raise RuntimeError(f"a request was not answered in full: {line}")
    if line["prompt_tokens"] != arrival.prompt_tokens:
        raise RuntimeError(f"the replica counted {line['prompt_tokens']} prompt tokens, not {arrival.prompt_tokens}")
    return Ended(
        backend=str(line["backend"]),
        arrived_s=arrival.at_s,
        ended_s=SPEED * seen.ended_s,
        ttft_s=SPEED * (seen.first_s - seen.sent_s),
        tpot_s=SPEED * (seen.ended_s - seen.first_s) / (arrival.output_tokens - 1),
        queue_wait_s=SPEED * float(str(line["queue_wait_s"])),
        hit_tokens=int(str(line["cached_tokens"] or 0)),
    )


# --- the comparison ---------------------------------------------------------------------------------------------------


def compared(case: Case, seed: int) -> list[Check]:
    """Run a case in both worlds and print its table."""
    arrivals = arrivals_of(case, seed)
    found, late_s = asyncio.run(real(arrivals, seed))
    runs = [virtual(case, arrivals, one) for one in LAB_SEEDS]
    print(
        f"{case.name}: {len(arrivals)} requests in {case.seconds:g} s at {case.rate:g}/s, seed {seed}, which took"
        f" {case.seconds / SPEED:.0f} s and more; the latest request left {1e3 * late_s:.1f} virtual ms late"
    )
    checks, rows = [], []
    for figure in FIGURES:
        values = [figure.of(ended, case) for ended in runs]
        check = Check(f"{case.name}, {figure.name}", fmean(values), figure.of(found, case), figure.band)
        checks.append(check)
        spread = f"{min(values):.4g}..{max(values):.4g}"
        error = f"{check.error:+.1%}" if check.expected else "-"
        rows.append([figure.name, f"{check.found:.4g}", f"{check.expected:.4g}", spread, error, check.verdict])
    print_table(["figure", "real time", "laboratory", "seeds", "real / lab", "band"], rows)
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals and of the real replicas")
    parser.add_argument("--short", type=float, default=1.0, help="share of each case's time to run, for a first look")
    options = parser.parse_args()
    busy = os.getloadavg()[0]
    if busy > LOAD_AVERAGE_MAX:
        print(
            f"the load average is {busy:.2f}: wait until this machine does nothing else, or noise decides", flush=True
        )
    checks: list[Check] = []
    for case in CASES:
        checks += compared(replace(case, seconds=case.seconds * options.short), options.seed)
    return report_broken(checks)


if __name__ == "__main__":
    sys.exit(main())
