"""The engine model against a real vLLM: the same requests for both, and a comparison of rules.

Rules, and no times, are compared: cached prompt tokens, numbers of tokens, steps and preemptions, running and waiting
requests, the order of ends, and the adapters in a batch. The list has three parts. Each begins with an empty prefix
cache:

- **serial**: one request at a time (prompts that share nothing, something, everything or whole blocks; next turns of a
  conversation; salts; adapters; more documents than the cache holds). Cached tokens must be equal for every request.
- **burst**: three times as many requests as may run, whose answers overflow the KV cache.
- **adapters**: requests of two adapters and the base model, where only one adapter fits a batch.

The requests of the last two parts queue while the engine is paused. The engine then runs a few steps at a time, so
that the result depends on rules alone. The model gets the tokens of each real answer, because vLLM caches them too.
Start the replicas like this, or with other small numbers. vLLM must be able to import benchmarks/:

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=. python -m vllm.entrypoints.openai.api_server --port 18001 \\
        --model tiny/model --enable-lora --lora-modules lora-0=tiny/lora-0 lora-1=tiny/lora-1 --max-loras 1 \\
        --max-cpu-loras 4 --block-size 32 --num-gpu-blocks-override 64 --max-num-seqs 4 --max-model-len 1024 \\
        --max-num-batched-tokens 256 --no-async-scheduling --enable-prompt-tokens-details \\
        --logits-processors benchmarks.lab.validation.slow_steps:SlowSteps
    python -m benchmarks.lab.validation.vllm_rules --backend http://127.0.0.1:18001 --backend http://127.0.0.1:18002

It takes about a minute. The table has a row for each figure, part and replica. A row outside its `band` is BROKEN: the
differences are listed below the table, and the exit status is 1. Tokens are counted as vLLM counts them. `token steps`
are steps that gave a token. `... in order` counts the distinct neighbouring states of the real gauges that the model
passed in the same order. The gauges are not read after every step, so that the model may have more states. `deferred`
are requests that wait for an adapter slot. The exit status is 2 if a replica is not comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field

import aiohttp

from benchmarks.lab.validation.request_list import Part, recorded_list
from benchmarks.lab.validation.vllm_replica import Answer, Replica, Settings, State, UnfitError
from benchmarks.table import Table
from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_cache import block_hashes
from llmproxy.lab.simulator.engine.profiles import profile_named
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from tests.lab.simulator.engine.invariants import check_engine

SEED = 7
PART_WITHIN_S = 180.0
SAMPLED_SHARE_MIN = 0.3


# --- the two sides ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """The behaviour of vLLM, or of the engine model, in a part of the list."""

    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Name of a request -> its cached prompt tokens."""
    ended: list[list[str]] = field(default_factory=list)
    """The names of the requests in the order of their last tokens, in groups that may have ended in one step."""
    states: list[State] = field(default_factory=lambda: [State()])
    """The states in order. Equal states that follow each other are kept once."""
    counters: dict[str, int] = field(default_factory=dict)
    """Name of a counter -> its increase during the part."""

    def add_state(self, state: State) -> None:
        """Appends a state, unless it equals the last."""
        if state != self.states[-1]:
            self.states.append(state)


async def ask_replica(replica: Replica, model: str, part: Part) -> tuple[Seen, dict[str, Answer]]:
    """Sends a part to a real replica. Returns its behaviour, and its answers by the name of the request.

    Raises TimeoutError if the replica hangs.
    """
    await replica.forget()
    seen, answers = Seen(), dict[str, Answer]()
    before = await replica.counters()
    async with asyncio.timeout(PART_WITHIN_S):
        if part.at_once:
            await _ask_at_once(replica, model, part, seen, answers)
        else:
            for request in part.requests:
                earlier = answers[request.after] if request.after else Answer((), (), 0)
                prompt = earlier.prompt + earlier.tokens + request.prompt
                answers[request.name] = await replica.read(request, prompt, await replica.send(model, request, prompt))
        # vLLM sets the gauges and counters of a step a moment after it sent the tokens.
        while await replica.state() != State():
            pass
    after = await replica.counters()
    seen.counters = {name: after[name] - before[name] for name in after}
    seen.cached_tokens = {name: answer.cached_tokens for name, answer in answers.items()}
    return seen, answers


async def _ask_at_once(replica: Replica, model: str, part: Part, seen: Seen, answers: dict[str, Answer]) -> None:
    """Queues all requests, then runs a few steps at a time and reads the state in between."""
    await replica.hold()
    try:
        responses = [await replica.send(model, request, request.prompt) for request in part.requests]
        reading = {
            request.name: asyncio.create_task(replica.read(request, request.prompt, response))
            for request, response in zip(part.requests, responses, strict=True)
        }
        while reading:
            await replica.pulse()
            # Computed tokens may not have arrived yet.
            while True:
                state = await replica.state()
                ended = [name for name, task in reading.items() if task.done()]
                if state.running + state.waiting == len(reading) - len(ended):
                    break
            seen.add_state(state)
            if ended:
                seen.ended.append(ended)
                answers |= {name: await reading.pop(name) for name in ended}
    finally:
        await replica.go_on()


def ask_model(settings: Settings, part: Part, answers: dict[str, Answer]) -> Seen:
    """Sends the same part to an engine model of the replica, which generates the tokens of the real answers."""
    engine = Engine(
        profile_named("tiny"),
        max_num_seqs=settings.max_num_seqs,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        kv_tokens=settings.blocks * settings.block_size,
        block_size=settings.block_size,
        step_tokens=settings.step_tokens,
        async_scheduling=False,
    )
    seen, token_steps = Seen(), 0
    for index, request in enumerate(part.requests):
        answer = answers[request.name]
        hashes = block_hashes(answer.prompt + answer.tokens, settings.block_size, request.adapter, request.salt)
        engine.add(EngineRequest(request.name, len(answer.prompt), request.answer_tokens, hashes, request.adapter))
        if part.at_once and index + 1 < len(part.requests):
            continue
        while engine.busy:
            result = engine.step()
            token_steps += bool(result.emitted)
            for name, cached_tokens in result.admitted:
                seen.cached_tokens.setdefault(name, cached_tokens)
            if result.finished:
                seen.ended.append(list(result.finished))
            gauges = engine.gauges()
            adapters = tuple(sorted(gauges.running_adapters))
            seen.add_state(State(gauges.running, gauges.waiting, gauges.deferred, adapters))
            check_engine(engine)
    totals = asdict(engine.counters)
    names = ("prefix_queries", "prefix_hits", "preemptions", "prompt", "generation")
    seen.counters = {name: totals[name] for name in names} | {"token_steps": token_steps}
    return seen


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a part, for vLLM and for the model. `lines` describe the differences."""

    figure: str
    real: str
    model: str
    band: str
    kept: bool
    lines: Sequence[str] = ()


def equal(figure: str, real: object, model: object) -> Row:
    return Row(figure, str(real), str(model), "equal", real == model)


def compare(part: Part, real: Seen, model: Seen) -> list[Row]:
    """Returns all figures of a part."""
    differing = [
        f"{part.name}: {request.name!r} ({request.adapter or 'base'}, salt {request.salt}) "
        f"had {real.cached_tokens[request.name]} "
        f"tokens cached in vLLM, {model.cached_tokens[request.name]} in the model"
        for request in part.requests
        if real.cached_tokens[request.name] != model.cached_tokens[request.name]
    ]
    agreeing = f"{len(part.requests) - len(differing)} of {len(part.requests)}"
    rows = [
        Row("requests with equal cached tokens", agreeing, str(len(part.requests)), "all", not differing, differing)
    ]
    rows += [equal(name.replace("_", " "), real.counters[name], model.counters[name]) for name in real.counters]
    if part.overflows:
        both = min(real.counters["preemptions"], model.counters["preemptions"])
        rows.append(
            Row(
                "preemptions happen",
                str(real.counters["preemptions"]),
                str(model.counters["preemptions"]),
                "1 or more",
                both > 0,
            )
        )
    if part.at_once:
        rows += [
            equal("most running", _most_running(real), _most_running(model)),
            equal("most waiting while most run", _plateau(real), _plateau(model)),
            equal("most adapters in a batch", _most_adapters(real), _most_adapters(model)),
            _order(part, real, model),
            _states(part, "running, waiting, adapters", real, model, lambda s: (s.running, s.waiting, s.adapters)),
        ]
    if any(state.deferred for state in model.states):
        rows.append(_states(part, "running, deferred", real, model, lambda s: (s.running, s.deferred)))
    return rows


def _most_running(seen: Seen) -> int:
    return max(state.running for state in seen.states)


def _plateau(seen: Seen) -> int:
    return max(state.waiting for state in seen.states if state.running == _most_running(seen))


def _most_adapters(seen: Seen) -> int:
    return max(len(state.adapters) for state in seen.states)


def _order(part: Part, real: Seen, model: Seen) -> Row:
    """Checks that groups end in the model in the order of vLLM."""
    step = {name: number for number, names in enumerate(model.ended) for name in names}
    lines = []
    for earlier, later in itertools.pairwise(real.ended):
        last, first = max(earlier, key=step.__getitem__), min(later, key=step.__getitem__)
        if step[last] >= step[first]:
            lines.append(f"{part.name}: {first!r} ended after {last!r} in vLLM, not so in the model")
    return Row("order of ends", f"{len(real.ended)} groups", f"{len(lines)} swapped", "0 swapped", not lines, lines)


def _states(part: Part, figure: str, real: Seen, model: Seen, of: Callable[[State], Hashable]) -> Row:
    """Counts the sampled states that the model passed in the same order."""
    sampled, gone = ([key for key, _ in itertools.groupby(map(of, seen.states))] for seen in (real, model))
    at = 0
    lines = []
    for state in sampled:
        if state in gone[at:]:
            at = gone.index(state, at)
        else:
            lines.append(f"{part.name}: {figure} were {state} in vLLM, and not in the model after {gone[at]}")
    found = f"{len(sampled) - len(lines)} of {len(sampled)}"
    enough = len(sampled) >= SAMPLED_SHARE_MIN * len(gone)
    band = f"all, at least {SAMPLED_SHARE_MIN:.0%} sampled"
    return Row(f"{figure} in order", found, f"of {len(gone)}", band, enough and not lines, lines)


Result = tuple[str, Settings, list[tuple[Part, Seen, dict[str, Answer]]]]
"""The URL and the settings of a real replica, and its behaviour in each part."""


async def ask_all(replica: Replica, seed: int) -> Result:
    """Sends the whole list to a real replica. Raises UnfitError if it cannot be compared with the engine model."""
    settings = await replica.settings()
    print(f"{replica.url}: {settings}", file=sys.stderr)
    parts = recorded_list(settings, seed)
    return replica.url, settings, [(part, *await ask_replica(replica, settings.model, part)) for part in parts]


async def main() -> int:
    """Prints the table. Returns 1 if a figure is outside its band, and 2 if a replica cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", required=True, metavar="URL", help="a real vLLM; repeatable")
    parser.add_argument("--seed", type=int, default=SEED, help="of the recorded list")
    options = parser.parse_args()
    # vLLM closes connections that were idle for 5 s.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    timeout = aiohttp.ClientTimeout(total=PART_WITHIN_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        try:
            replicas = [Replica(url, session) for url in options.backend]
            asked = await asyncio.gather(*(ask_all(replica, options.seed) for replica in replicas))
        except (UnfitError, aiohttp.ClientError, TimeoutError) as error:
            print(f"no comparison: {error or 'a replica hangs'}", file=sys.stderr)
            return 2
    # The simulated engines run last, because their CPU time would lengthen the pauses between requests to the replicas.
    rows = [
        (url, part.name, row)
        for url, settings, parts in asked
        for part, real, answers in parts
        for row in compare(part, real, ask_model(settings, part, answers))
    ]
    table = Table("replica", "part", "figure", "vLLM", "model", "band", "", texts=3)
    for url, name, row in rows:
        table.row(url, name, row.figure, row.real, row.model, row.band, "kept" if row.kept else "BROKEN")
    for url, _, row in rows:
        for line in row.lines:
            print(f"{url}, {line}")
    return 0 if all(row.kept for _, _, row in rows) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
