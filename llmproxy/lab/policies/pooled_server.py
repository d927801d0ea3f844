"""A model of the whole fleet as one ideal server: the work of a request, and the queue before the server."""

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
    """A request that arrives at `at_s`, and its cached prompt tokens: `hit_tokens` in a pooled cache, `known_tokens` in
    an unlimited cache. `counted` is False during the warm-up.
    """

    arrival: Arrival
    at_s: float
    hit_tokens: int
    known_tokens: int
    counted: bool = True

    @property
    def first(self) -> int:
        """The first prompt position to compute. The last position is always computed, for the first output token."""
        return min(self.hit_tokens, self.arrival.prompt_tokens - 1)


class EngineWork(NamedTuple):
    """Sums over requests. Step times are linear in each sum. A price list has the same fields, with the price
    of one unit.
    """

    requests: float = 0.0
    prefill_tokens: float = 0.0
    prefill_squares: float = 0.0  # end² - first² of the prompt positions to compute.
    decode_tokens: float = 0.0
    context_tokens: float = 0.0  # Tokens of context, summed over all decoded tokens.
    private_tokens: float = 0.0  # The part of `context_tokens` that needs KV cache, because no earlier request has it.

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
    """Returns the work of prompt and answer. The last prompt step yields the first output token, so an answer needs one
    decode step less than it has tokens.
    """
    first, end, decodes = served.first, served.arrival.prompt_tokens, served.arrival.output_tokens - 1
    grown = decodes * (decodes + 1) / 2
    private = decodes * (end - served.known_tokens) + grown
    return EngineWork(1.0, end - first, end**2 - first**2, decodes, decodes * end + grown, private)


def price_lists(spec: ReplicaSpec, prefill_scale: float) -> list[EngineWork]:
    """Returns price lists: the seconds of one replica for a unit of each kind of work. By every list, the cost of any
    work is a lower bound of its time.

    A step costs a constant, an amount per token, and attention. `step_tokens`, `max_num_seqs` and the KV cache set the
    least number of steps for any work. A step takes the larger of two times (weight reads, compute), so all steps take
    at least the larger of both sums. There is one list for each combination of these limits, in the same order for all
    replicas. The most expensive list is the tightest bound. Noise, faults, preemption and adapters are left out: they
    make a real replica slower.
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
    """Returns a lower bound of the seconds that one replica needs for `work`."""
    return max(work.cost(prices) for prices in price_lists(spec, prefill_scale))


def balance_rps(fleet: SimulatedFleet, prefill_scale: float, mix: EngineWork) -> float:
    """Returns the requests of `mix` per second in the steady state: the sum of 1 / (c_p + c_d) over the replicas.

    c_p is the time of a prompt in full steps, c_d the time of an answer in the largest batch that fits. The result
    agrees with published measurements but is no bound.
    """
    return sum(
        mix.requests / (least_s(spec, prefill_scale, mix.prompt) + least_s(spec, prefill_scale, mix.answer))
        for spec in fleet.replicas
    )


class PooledServer:
    """All replicas of a fleet as one server. Each replica is always busy with the work that suits it best."""

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

        # The division of work among unequal replicas is a linear program. A list for each kind of replica, with
        # weights that add up to 1, solves its dual, so it is a bound. These weights are optimal if every replica gets
        # the same mix. All kinds use the list of the same limits; otherwise one kind would seem cheap for prompts and
        # another for answers only because their lists differ.
        best = max(zip(*lists, strict=True), key=whole_s)
        self._whole_prices = [prices.times(whole_s(best) / mix.cost(prices)) for prices in best]

    def service_s(self, served: Served) -> float:
        """Returns a lower bound of the seconds that the whole fleet needs for the request."""
        work = work_of(served)
        return min(work.cost(prices) for prices in self._whole_prices)

    def prompt_s(self, served: Served) -> float:
        """Returns a lower bound of the seconds for the prompt on the fastest replica, computed together with other
        prompts.
        """
        work = work_of(served).prompt
        return min(work.cost(prices) for prices in self._prompt_prices)

    def unloaded_s(self, served: Served) -> tuple[float, float]:
        """Returns the (front end, prefill) seconds on the fastest replica if it is idle."""
        first, end = served.first, served.arrival.prompt_tokens
        return min(((p.frontend_s, prefill_s(p, step_tokens, first, end)) for p, step_tokens in self._engines), key=sum)


class CentralQueue:
    """Waits in a queue for several servers, first come, first served (Kiefer and Wolfowitz, 1955; for one server,
    Lindley, 1952).
    """

    def __init__(self, servers: int) -> None:
        self._free_s = [-inf] * servers

    def wait_s(self, at_s: float, service_s: float) -> float:
        """Returns the wait of a request that arrives at `at_s` and takes `service_s`. Call it in order of arrival."""
        wait_s = max(0.0, self._free_s[0] - at_s)
        heapreplace(self._free_s, at_s + wait_s + service_s)
        return wait_s


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The best figures of the pooled server. All are None without requests; times and load are None without arrival
    times. Times to first token are accurate within 0.5 %.
    """

    requests_per_s: float | None = None  # The highest rate of requests like these.
    service_s: float | None = None  # The inverse of `requests_per_s`.
    utilisation: float | None = None  # The work of the trace, divided by the fleet's capacity in that time.
    pooled_ttft_p50_s: float | None = None
    pooled_ttft_p99_s: float | None = None
    floor_ttft_p50_s: float | None = None
    floor_ttft_p99_s: float | None = None


def queue_bounds(requests: Iterable[Served], server: PooledServer, timed: bool, since_s: float = 0.0) -> QueueBounds:
    """Returns the bounds for `requests`, in order of arrival. Requests before `since_s` are not counted. `timed` is
    False for a closed loop, whose arrival times depend on the answers.

    *Rate*: no policy with at most `hit_tokens` cached can serve more of these requests per second.

    *Pooled*: an estimate, no strict bound. A server as fast as all replicas together serves whole requests first come,
    first served. The prefill time on an idle replica is added to the wait, because two replicas never compute one
    request together.

    *Floor*: a central queue with one server for each replica, and prompts only, each as cheap as in a full step on the
    fastest replica. No policy that serves in order, with at most `hit_tokens` cached, has shorter times to first token.
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
        # In a step with earlier prompts, a prompt costs less than alone, but it never ends earlier than alone.
        floor.add(frontend_s + max(prefill_alone_s, prompt_wait_s + prompt_s))
        count, total_s, last_s = count + 1, total_s + service_s, served.at_s
    if not count:
        return QueueBounds()
    ttft_s = [sketch.quantile(q) if timed else None for sketch in (pooled, floor) for q in (0.5, 0.99)]
    utilisation = total_s / (last_s - since_s) if timed and last_s > since_s else None
    return QueueBounds(count / total_s, total_s / count, utilisation, *ttft_s)
