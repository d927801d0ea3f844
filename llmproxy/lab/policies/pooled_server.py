"""The whole fleet as one server that is never held up: how much work a request is, and the queue in front of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from math import inf
from operator import add, mul
from typing import NamedTuple

from llmproxy.lab.fleet.spec import ReplicaSpec, SimulatedFleet
from llmproxy.lab.results.objectives import prefill_s, scaled_profile
from llmproxy.lab.results.sketch import Sketch
from llmproxy.lab.traces.arrival import Arrival


@dataclass(frozen=True, slots=True)
class Served:
    """A request and the prompt tokens that it finds: `hit_tokens` in a pooled cache, `known_tokens` in one without end.

    It comes at `at_s`; `counted` is False during the warm-up.
    """

    arrival: Arrival
    at_s: float
    hit_tokens: int
    known_tokens: int
    counted: bool = True

    @property
    def first(self) -> int:
        """The first prompt position to compute. The last one is never spared: it brings the first output token."""
        return min(self.hit_tokens, self.arrival.prompt_tokens - 1)


class EngineWork(NamedTuple):
    """What requests want from an engine, as the sums in which the step-time formula is linear; or their prices.

    `prefill_squares` is end² - first² of the prompt positions to compute. `context_tokens` adds up, over all decoded
    tokens, the context that each attends to, and `private_tokens` that part of it which no earlier request has brought
    along, so that no other request in the batch can hold it.
    """

    requests: float = 0.0
    prefill_tokens: float = 0.0
    prefill_squares: float = 0.0
    decode_tokens: float = 0.0
    context_tokens: float = 0.0
    private_tokens: float = 0.0

    def plus(self, other: EngineWork) -> EngineWork:
        return EngineWork(*map(add, self, other))

    def times(self, factor: float) -> EngineWork:
        return EngineWork(*(factor * one for one in self))

    @property
    def prompt(self) -> EngineWork:
        return EngineWork(self.requests, self.prefill_tokens, self.prefill_squares)

    @property
    def answer(self) -> EngineWork:
        return self._replace(requests=0.0, prefill_tokens=0.0, prefill_squares=0.0)

    def cost(self, prices: EngineWork) -> float:
        return float(sum(map(mul, self, prices)))


def work_of(served: Served) -> EngineWork:
    """Prompt and answer. The step that ends the prompt brings the first output token, so one less is decoded."""
    first, end, decodes = served.first, served.arrival.prompt_tokens, served.arrival.output_tokens - 1
    grown = decodes * (decodes + 1) / 2
    private = decodes * (end - served.known_tokens) + grown
    return EngineWork(1.0, end - first, end**2 - first**2, decodes, decodes * end + grown, private)


def price_lists(spec: ReplicaSpec, prefill_scale: float) -> list[EngineWork]:
    """Lists of prices, in seconds on one replica: by each of them, no schedule does any work in less than its cost.

    The cost of a step is a constant, something per token, and attention. However work is cut into steps, there are at
    least as many as its tokens need under `step_tokens`, and at least as many that decode as `max_num_seqs` and the
    KV-cache enforce, where the contexts of a batch must fit together. And the sum over all steps of the larger of two
    lines (bound by weight reads, bound by compute) is at least the larger of their two sums. There is one list for
    each choice among these limits, in the same order for all replicas; the dearest is closest to the truth.

    Noise, faults, preemption, adapters, and the KV of prompts that are not decoded yet are left out: all of them make
    a real replica slower.
    """
    profile = scaled_profile(spec, prefill_scale)
    budget = EngineWork(prefill_tokens=1 / spec.step_tokens, decode_tokens=1 / spec.step_tokens)
    chunk_ms, square_ms = profile.prefill_ms
    decode_ms, context_ms = profile.decode_ms
    attention = EngineWork(requests=chunk_ms, prefill_squares=square_ms, context_tokens=context_ms)
    lists = []
    for decoding in (EngineWork(decode_tokens=1 / spec.max_num_seqs), EngineWork(private_tokens=1 / spec.kv_tokens)):
        for steps in (decoding, budget):
            for (constant_ms, token_ms), scale in ((profile.small_ms, 1.0), (profile.large_ms, prefill_scale)):
                line = EngineWork(prefill_tokens=scale * token_ms, decode_tokens=token_ms)
                line = line.plus(steps.times(profile.overhead_ms + constant_ms))
                lists.append(line.plus(attention).plus(decoding.times(decode_ms)).times(1e-3))
    return lists


def least_s(spec: ReplicaSpec, prefill_scale: float, work: EngineWork) -> float:
    """Seconds that one replica takes for `work` at least."""
    return max(work.cost(prices) for prices in price_lists(spec, prefill_scale))


def balance_rps(fleet: SimulatedFleet, prefill_scale: float, mix: EngineWork) -> float:
    """Requests of `mix` per second when every replica has as much time as its prompts, in full steps, and its answers,
    in the largest batch that fits, take one after the other: 1 / (c_p + c_d(B)) for each replica.

    It is the steady-state balance against which published knees were checked, and no bound: steps that prefill and
    decode at once spare their constant, and memory that is held by prompts or shared prefixes makes batches smaller.
    """
    return sum(
        mix.requests / (least_s(spec, prefill_scale, mix.prompt) + least_s(spec, prefill_scale, mix.answer))
        for spec in fleet.replicas
    )


class PooledServer:
    """All replicas of a fleet together, each always busy, and with the work that suits it best."""

    def __init__(self, fleet: SimulatedFleet, prefill_scale: float, mix: EngineWork) -> None:
        self.replicas = len(fleet.replicas)
        kinds: dict[ReplicaSpec, int] = {}
        for spec in fleet.replicas:
            kind = replace(spec, name="", joins_s=0.0)
            kinds[kind] = kinds.get(kind, 0) + 1
        self._engines = [(scaled_profile(kind, prefill_scale), kind.step_tokens) for kind in kinds]
        lists = [price_lists(kind, prefill_scale) for kind in kinds]
        prompt = EngineWork(prefill_tokens=1.0)
        self._prompt_prices = [max(one, key=prompt.cost) for one in lists]

        def whole_s(prices: Sequence[EngineWork]) -> float:
            costs = [mix.cost(one) for one in prices]
            return 1 / sum(count / cost for count, cost in zip(kinds.values(), costs, strict=True)) if all(costs) else 0

        # Sharing out work among unequal replicas is a linear program. One list for each kind, with weights of the
        # replicas that add up to 1, is a solution of its dual, hence a bound. These weights are the best ones where
        # every replica gets the same mix, and unequal kinds are priced by the same limits, so that none is cheap in
        # prompts and another in answers merely for the choice of lists.
        best = max(zip(*lists, strict=True), key=whole_s)
        self._whole_prices = [prices.times(whole_s(best) / mix.cost(prices)) for prices in best]

    def service_s(self, served: Served) -> float:
        """Seconds of the whole fleet that the request takes at least."""
        work = work_of(served)
        return min(work.cost(prices) for prices in self._whole_prices)

    def prompt_s(self, served: Served) -> float:
        """Seconds of one replica, the fastest for it, that the prompt takes at least, computed along with others."""
        work = work_of(served).prompt
        return min(work.cost(prices) for prices in self._prompt_prices)

    def unloaded_s(self, served: Served) -> tuple[float, float]:
        """(front end, prefill) seconds on an idle replica, the fastest for it."""
        first, end = served.first, served.arrival.prompt_tokens
        return min(((p.frontend_s, prefill_s(p, step_tokens, first, end)) for p, step_tokens in self._engines), key=sum)


class CentralQueue:
    """First come, first served, by the first of `servers` that is free: the recursion of Kiefer and Wolfowitz (1955),
    and with one server that of Lindley (1952).
    """

    def __init__(self, servers: int) -> None:
        self._free_s = [-inf] * servers

    def wait_s(self, at_s: float, service_s: float) -> float:
        """How long a request waits that comes at `at_s`, not before the previous one, and takes `service_s`."""
        wait_s = max(0.0, self._free_s[0] - at_s)
        heapreplace(self._free_s, at_s + wait_s + service_s)
        return wait_s


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What the pooled server could do at best; None without requests, and for times and load without arrival times.

    `requests_per_s` is the highest rate of such requests, and `service_s` its inverse. `utilisation` is the work that
    the trace brings over what the fleet can do in that time. Times to first token are within 0.5 %.
    """

    requests_per_s: float | None = None
    service_s: float | None = None
    utilisation: float | None = None
    pooled_ttft_p50_s: float | None = None
    pooled_ttft_p99_s: float | None = None
    floor_ttft_p50_s: float | None = None
    floor_ttft_p99_s: float | None = None


def queue_bounds(requests: Iterable[Served], server: PooledServer, timed: bool, since_s: float = 0.0) -> QueueBounds:
    """Let `requests`, in order of their times, queue for the fleet, and count from `since_s` on.

    `timed` says whether the times are those at which requests arrive, which a closed loop decides only when it runs.

    *Rate*: no policy sustains more of these requests per second, as long as it finds no more tokens cached than
    `hit_tokens`. It errs upwards.

    *Pooled*: one server, as fast as all replicas together, serves whole requests first come, first served. To its wait
    comes the prefill on an idle replica, since no request is computed by two. It is the queue that perfect pooling
    would leave, no strict bound: it errs upwards where few requests are in the fleet (a free replica begins at once,
    whatever the others do) and where answers are long (replicas begin a prompt before earlier answers are complete),
    and downwards elsewhere. A policy that does not serve in order may trade one quantile for another.

    *Floor*: as many servers as replicas, a central queue, and nothing but prompts, each as cheap as in a full step on
    the fastest replica. It errs downwards, and no policy that serves in order and finds no more tokens cached is below.
    """
    pooled, floor = Sketch(), Sketch()
    fleet_queue, prompt_queue = CentralQueue(1), CentralQueue(server.replicas)
    count, total_s, last_s = 0, 0.0, since_s
    for served in requests:
        service_s, prompt_s = server.service_s(served), server.prompt_s(served)
        pooled_wait_s = fleet_queue.wait_s(served.at_s, service_s)
        prompt_wait_s = prompt_queue.wait_s(served.at_s, prompt_s)
        if not served.counted:
            continue
        frontend_s, prefill_alone_s = server.unloaded_s(served)
        pooled.add(frontend_s + pooled_wait_s + prefill_alone_s)
        # In one step with the prompts before it, a prompt pays less than alone, but it is never sooner than alone.
        floor.add(frontend_s + max(prefill_alone_s, prompt_wait_s + prompt_s))
        count, total_s, last_s = count + 1, total_s + service_s, served.at_s
    if not count:
        return QueueBounds()
    ttft_s = [sketch.quantile(q) if timed else None for sketch in (pooled, floor) for q in (0.5, 0.99)]
    utilisation = total_s / (last_s - since_s) if timed and last_s > since_s else None
    return QueueBounds(count / total_s, total_s / count, utilisation, *ttft_s)
