"""Generators of contention: tenants that exceed the capacity, and critical requests on a full fleet."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import accumulate
from random import Random
from typing import Annotated

from llmproxy.lab.traces.arrival import Arrival
from llmproxy.lab.traces.parts import Rate, Seconds, Tokens, Within, check, poisson_times, varying_times


def unequal_tenants(
    *,
    tenants: Annotated[int, Within(2, 1_000)] = 4,
    ratio: Annotated[float, Within(1, 100)] = 2.0,
    rate: Rate = 25.0,
    ttft_slo_s: Seconds = 2.0,
    duration_s: Seconds = 480.0,
    prompt_tokens: Tokens = 512,
    output_tokens: Tokens = 128,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields the requests of several tenants. Each tenant sends `ratio` times as many as the previous tenant.

    Together they send `rate` requests per second (Poisson). The only objective is a first token within `ttft_slo_s`.
    All requests cost the same. So in the max-min optimum, every tenant has the same share of requests in time: the
    requests that the fleet can complete in time, divided by all requests.
    """
    names = [f"tenant-{number}" for number in range(1, tenants + 1)]
    shares = list(accumulate(ratio**number for number in range(tenants)))

    rng = Random(seed)
    for at_s in poisson_times(rng, rate, duration_s):
        (tenant,) = rng.choices(names, cum_weights=shares)
        yield Arrival(at_s, prompt_tokens, output_tokens, tenant=tenant, ttft_slo_s=ttft_slo_s, tpot_slo_s=duration_s)


def critical_bursts(
    *,
    rate: Rate = 40.0,
    sheddable_rate: Rate = 40.0,
    period_s: Seconds = 20.0,
    burst_s: float = 4.0,
    duration_s: Seconds = 100.0,
    prompt_tokens: Tokens = 512,
    output_tokens: Tokens = 128,
    sheddable_prompt_tokens: Tokens = 4_096,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields sheddable requests at a constant `sheddable_rate` per second (Poisson), with bursts of critical requests.

    Critical requests come at `rate` in the last `burst_s` of each `period_s`. Prompts share nothing. Raises TraceError.
    """
    check(0, period_s, burst_s=burst_s)

    def rate_at(at_s: float) -> float:
        return rate if at_s % period_s >= period_s - burst_s else 0.0

    rng = Random(seed)
    calm, bursting = Random(rng.getrandbits(64)), Random(rng.getrandbits(64))
    sheddable = ((at_s, "sheddable") for at_s in poisson_times(calm, sheddable_rate, duration_s))
    critical = ((at_s, "critical") for at_s in varying_times(bursting, rate_at, rate, duration_s))
    for at_s, band in merge(sheddable, critical):
        prompt = prompt_tokens if band == "critical" else sheddable_prompt_tokens
        yield Arrival(at_s, prompt, output_tokens, tenant=band, band=band)


def critical_and_flood(
    *,
    every_s: Seconds = 0.5,
    critical_from_s: Annotated[float, Within(0, 1e6)] = 15.0,
    flood_from_s: Annotated[float, Within(0, 1e6)] = 0.0,
    flood: Annotated[int, Within(1, 1_000_000)] = 240,
    both_s: Seconds = 40.0,
    first_s: Seconds = 10.0,
    prompt_tokens: Tokens = 128,
    output_tokens: Tokens = 32,
    flood_prompt_tokens: Tokens = 256,
    flood_output_tokens: Tokens = 512,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields a critical request every `every_s`, and `flood` sheddable requests at one moment.

    Critical requests begin at `critical_from_s` and the flood at `flood_from_s`; critical requests end `both_s` after
    the later of the two times. Their tenant is `before` until that time, `first` for the next `first_s`, and `after`
    later. Answers of the flood have 0.5 to 1.5 times `flood_output_tokens`. Prompts share nothing.
    """
    both_from_s = max(critical_from_s, flood_from_s)

    def critical() -> Iterator[Arrival]:
        for number in range(int((both_from_s + both_s - critical_from_s) / every_s)):
            at_s = critical_from_s + number * every_s
            tenant = "before" if at_s < both_from_s else "first" if at_s < both_from_s + first_s else "after"
            yield Arrival(at_s, prompt_tokens, output_tokens, tenant=tenant, band="critical")

    def sheddable() -> Iterator[Arrival]:
        rng = Random(seed)
        for _ in range(flood):
            answer = max(1, round(rng.uniform(0.5, 1.5) * flood_output_tokens))
            yield Arrival(flood_from_s, flood_prompt_tokens, answer, tenant="flood", band="sheddable")

    return merge(sheddable(), critical(), key=lambda arrival: arrival.at_s)
