"""Generators of single requests: shared prompts, adapters, noisy neighbours, bands and bursts."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import count, cycle
from math import cos, pi
from random import Random
from typing import Annotated

from llmproxy.lab.traces.arrival import Arrival
from llmproxy.lab.traces.formats import LENGTH_TOKENS_MAX, TIME_MAX_S
from llmproxy.lab.traces.parts import (
    BlockTokens,
    LogNormal,
    Rate,
    Seconds,
    Share,
    Sigma,
    Text,
    Tokens,
    Within,
    check,
    gamma_times,
    poisson_times,
    varying_times,
)

RAMP_RATES = (2.0, 4.0, 6.0, 8.0, 10.0, 4.0, 1.0)  # Requests per second, one stage after another.


def shared_system_prompts(
    *,
    rate: Rate = 20.0,
    duration_s: Seconds = 300.0,
    prefixes: Annotated[int, Within(1, 10_000)] = 150,
    users: Annotated[int, Within(1, 10_000)] = 5,
    system_tokens: Tokens = 6_000,
    question_tokens: Tokens = 1_200,
    output_tokens: Tokens = 1_000,
    block_tokens: BlockTokens = 16,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields llm-d's b2b-saas benchmark at a constant rate (Poisson).

    The `users` of each of `prefixes` customers share a long system prompt. As in the published load generator, each
    user has one question; the prefixes x users prompts are shuffled once and then sent again and again in this order.
    If all fit the caches, every prompt after the first round is a hit. The tenant is the customer. Raises TraceError.
    """
    check(1, 10_000, all_users=prefixes * users)
    rng, ids = Random(seed), count()
    prompts = list[tuple[str, str, tuple[int, ...]]]()
    for prefix in range(prefixes):
        system = Text(ids, block_tokens, system_tokens)
        for user in range(users):
            prompt = Text(ids, block_tokens, question_tokens, system)
            prompts.append((f"customer-{prefix}", f"user-{prefix}-{user}", prompt.blocks()))
    rng.shuffle(prompts)
    # With a constant rate, the thinning drops nothing. It only draws numbers, so that a seed gives the same old trace.
    times = varying_times(rng, lambda _: rate, rate, duration_s)
    for at_s, (tenant, session, blocks) in zip(times, cycle(prompts), strict=False):
        tokens = system_tokens + question_tokens
        yield Arrival(at_s, tokens, output_tokens, blocks, tenant, session=session)


def lora_zipf(
    *,
    adapters: Annotated[int, Within(1, 10_000)] = 100,
    alpha: Annotated[float, Within(0, 10)] = 1.0,
    cv: Annotated[float, Within(0.05, 20)] = 1.0,
    rate: Rate = 2.0,
    duration_s: Seconds = 300.0,
    tokens_min: Tokens = 8,
    tokens_max: Tokens = 512,
    drift_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields requests for LoRA adapters of power-law popularity, as in S-LoRA with its defaults.

    The i-th most popular adapter gets a share of requests in proportion to i^-alpha. The gaps between its requests have
    a Gamma distribution with the coefficient of variation `cv`. Lengths of prompts and answers are uniform in
    tokens_min..tokens_max, and prompts share nothing. Every `drift_s` seconds (0: never) the order of popularity is
    shuffled. Raises TraceError.
    """
    check(tokens_min, LENGTH_TOKENS_MAX, tokens_max=tokens_max)
    if drift_s:
        check(1e-3, TIME_MAX_S, drift_s=drift_s)
    weights = [rank**-alpha for rank in range(1, adapters + 1)]
    width = len(str(adapters - 1))

    rng = Random(seed)
    names = [f"lora-{number:0{width}}" for number in range(adapters)]

    def process(rank: int) -> Iterator[tuple[float, int]]:
        own = Random(rng.getrandbits(64))
        share = weights[rank] / sum(weights)
        return ((at_s, rank) for at_s in gamma_times(own, rate * share, cv, duration_s))

    dealt = 0
    for at_s, rank in merge(*[process(rank) for rank in range(adapters)]):
        while drift_s and dealt < int(at_s / drift_s):
            rng.shuffle(names)
            dealt += 1
        lengths = rng.randint(tokens_min, tokens_max), rng.randint(tokens_min, tokens_max)
        yield Arrival(at_s, *lengths, adapter=names[rank])


def noisy_neighbour(
    *,
    tenants: Annotated[int, Within(2, 10_000)] = 8,
    rate: Rate = 8.0,
    factor: Annotated[float, Within(1, 1_000)] = 10.0,
    start_s: float = 120.0,
    end_s: float = 360.0,
    ramp_s: float = 30.0,
    duration_s: Seconds = 480.0,
    prompt_tokens: Tokens = 512,
    output_tokens: Tokens = 256,
    sigma: Sigma = 0.8,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields equal tenants with `rate` requests per second together (Poisson), and a burst of the tenant `noisy`.

    From `start_s` to `end_s`, `noisy` sends `factor` times as many requests, with ramps of `ramp_s`. Lengths are
    log-normal with the given means, and prompts share nothing. Raises TraceError.
    """
    check(0, duration_s, end_s=end_s)
    check(0, end_s, start_s=start_s)
    check(0, (end_s - start_s) / 2, ramp_s=ramp_s)
    prompt, output, share = LogNormal(prompt_tokens, sigma), LogNormal(output_tokens, sigma), rate / tenants

    def noise_at(at_s: float) -> float:
        inside_s = min(at_s - start_s, end_s - at_s)
        grown = 0.0 if inside_s < 0 else 1.0 if inside_s >= ramp_s else inside_s / ramp_s
        return share * (1 + (factor - 1) * grown)

    rng = Random(seed)
    quiet = rate - share
    for at_s in varying_times(rng, lambda at_s: quiet + noise_at(at_s), quiet + share * factor, duration_s):
        is_noise = rng.random() * (quiet + noise_at(at_s)) >= quiet
        tenant = "noisy" if is_noise else f"tenant-{rng.randrange(1, tenants)}"
        yield Arrival(at_s, prompt.tokens(rng), output.tokens(rng), tenant=tenant)


def priority_mix(
    *,
    rate: Rate = 6.0,
    duration_s: Seconds = 300.0,
    critical: Share = 0.2,
    sheddable: Share = 0.2,
    prompt_tokens: Tokens = 1_000,
    shared_tokens: int = 1_000,
    output_tokens: Tokens = 512,
    block_tokens: BlockTokens = 16,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields llm-d-benchmark's mix of bands: 20 % critical, 60 % default, 20 % sheddable, otherwise equal (Poisson).

    All prompts are identical, as published. The length of answers is published, and the length of prompts is not. If
    `shared_tokens` is less than `prompt_tokens`, no prompts share the rest. Raises TraceError.
    """
    check(0, 1, critical_and_sheddable=round(critical + sheddable, 9))
    check(0, prompt_tokens, shared_tokens=shared_tokens)

    rng, ids = Random(seed), count()
    shared = Text(ids, block_tokens, shared_tokens)
    for at_s in poisson_times(rng, rate, duration_s):
        prompt = shared
        if shared_tokens < prompt_tokens:
            prompt = Text(ids, block_tokens, prompt_tokens - shared_tokens, shared)
        drawn = rng.random()
        band = "critical" if drawn < critical else "sheddable" if drawn >= 1 - sheddable else "default"
        yield Arrival(at_s, prompt_tokens, output_tokens, prompt.blocks(), band=band)


def step_bursts(
    *,
    rate: Rate = 5.0,
    factor: Annotated[float, Within(1, 1_000)] = 5.0,
    period_s: Seconds = 120.0,
    step_s: float = 30.0,
    duration_s: Seconds = 600.0,
    prompt_tokens: Tokens = 1_155,
    output_tokens: Tokens = 211,
    sigma: Sigma = 0.9,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields `rate` requests per second (Poisson), and `factor` times as many in the last `step_s` of each `period_s`.

    Lengths are log-normal; the default means are from Azure's conversations of 2023. Prompts share nothing. Raises
    TraceError.
    """
    check(0, period_s, step_s=step_s)
    prompt, output = LogNormal(prompt_tokens, sigma), LogNormal(output_tokens, sigma)

    def rate_at(at_s: float) -> float:
        return rate * factor if at_s % period_s >= period_s - step_s else rate

    rng = Random(seed)
    for at_s in varying_times(rng, rate_at, rate * factor, duration_s):
        yield Arrival(at_s, prompt.tokens(rng), output.tokens(rng))


def rate_ramp(
    *,
    factor: Annotated[float, Within(1e-3, 1_000)] = 1.0,
    stage_s: Seconds = 400.0,
    prompt_tokens: Tokens = 4_000,
    output_tokens: Tokens = 1_000,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields the ramp of llm-d's published autoscaling results (Poisson): the stages of `RAMP_RATES`.

    Lengths are within a third of their means, and prompts share nothing.
    """
    rng = Random(seed)

    def rate_at(at_s: float) -> float:
        return factor * RAMP_RATES[min(int(at_s / stage_s), len(RAMP_RATES) - 1)]

    for at_s in varying_times(rng, rate_at, factor * max(RAMP_RATES), stage_s * len(RAMP_RATES)):
        yield Arrival(at_s, _about(rng, prompt_tokens), _about(rng, output_tokens))


def day(
    *,
    least: Rate = 1.0,
    most: Rate = 10.0,
    period_s: Seconds = 3_600.0,
    days: Annotated[int, Within(1, 100)] = 1,
    prompt_tokens: Tokens = 4_000,
    output_tokens: Tokens = 1_000,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields days of `period_s` seconds (Poisson): the rate is `least` at the begin and end, and `most` in the middle.

    Lengths are within a third of their means, and prompts share nothing.
    """
    rng = Random(seed)

    def rate_at(at_s: float) -> float:
        return (least + most) / 2.0 - (most - least) / 2.0 * cos(2.0 * pi * at_s / period_s)

    for at_s in varying_times(rng, rate_at, max(least, most), days * period_s):
        yield Arrival(at_s, _about(rng, prompt_tokens), _about(rng, output_tokens))


def _about(rng: Random, mean: int) -> int:
    return max(1, round(mean * rng.uniform(2.0 / 3.0, 4.0 / 3.0)))


def mixed_objectives(
    *,
    rate: Rate = 20.0,
    duration_s: Seconds = 120.0,
    tight: Share = 0.3,
    tight_ttft_s: Seconds = 0.15,
    tight_tpot_s: Seconds = 0.025,
    lax_ttft_s: Seconds = 4.0,
    lax_tpot_s: Seconds = 0.08,
    sigma: Sigma = 0.6,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields short prompts with a narrow objective (the share `tight`), and longer prompts with a wide one (Poisson).

    Lengths are log-normal, with means of 800 prompt tokens (tight) or 2,400 (lax) and 110 output tokens. The tenant is
    the kind of request.
    """
    output = LogNormal(110, sigma)
    kinds = {
        "tight": (LogNormal(800, sigma), tight_ttft_s, tight_tpot_s),
        "lax": (LogNormal(2_400, sigma), lax_ttft_s, lax_tpot_s),
    }

    rng = Random(seed)
    for at_s in poisson_times(rng, rate, duration_s):
        tenant = "tight" if rng.random() < tight else "lax"
        prompt, ttft_s, tpot_s = kinds[tenant]
        yield Arrival(at_s, prompt.tokens(rng), output.tokens(rng), tenant=tenant, ttft_slo_s=ttft_s, tpot_slo_s=tpot_s)


def mixed_lengths(
    *,
    rate: Rate = 20.0,
    duration_s: Seconds = 120.0,
    long: Share = 0.25,
    long_prompt_tokens: Tokens = 8_000,
    long_output_tokens: Tokens = 100,
    short_prompt_tokens: Tokens = 300,
    short_output_tokens: Tokens = 500,
    sigma: Sigma = 0.6,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields long prompts with short answers (the share `long`), and short prompts with long answers (Poisson).

    Lengths are log-normal with these means, and prompts share nothing. The tenant is the kind of request.
    """
    kinds = {
        "long": (LogNormal(long_prompt_tokens, sigma), LogNormal(long_output_tokens, sigma)),
        "short": (LogNormal(short_prompt_tokens, sigma), LogNormal(short_output_tokens, sigma)),
    }

    rng = Random(seed)
    for at_s in poisson_times(rng, rate, duration_s):
        tenant = "long" if rng.random() < long else "short"
        prompt, output = kinds[tenant]
        yield Arrival(at_s, prompt.tokens(rng), output.tokens(rng), tenant=tenant)
