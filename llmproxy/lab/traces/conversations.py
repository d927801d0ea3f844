"""Generators of conversations, in which each prompt contains all earlier prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random
from typing import Annotated

from llmproxy.lab.traces.arrival import Arrival, chained
from llmproxy.lab.traces.formats import LENGTH_TOKENS_MAX
from llmproxy.lab.traces.parts import (
    BlockTokens,
    LogNormal,
    Rate,
    Seconds,
    Sigma,
    Text,
    Tokens,
    TokensOrNone,
    Within,
    check,
    poisson_times,
)

NOMINAL_TOKEN_S = 0.02  # Seconds per output token for the nominal times of chained turns. A replay uses the real times.
CHAIN_MAX = 200  # Most turns of one closed loop, because all its turns are in memory at the same time.


def interactive_chat(
    *,
    rate: Rate = 2.0,
    duration_s: Seconds = 600.0,
    turns: Annotated[int, Within(1, CHAIN_MAX)] = 4,
    shared_tokens: TokensOrNone = 1_000,
    context_tokens: Tokens = 4_000,
    sigma: Sigma = 0.6,
    question_tokens: Tokens = 50,
    answer_tokens: Tokens = 300,
    think_s: Annotated[float, Within(5, 300)] = 45.0,
    block_tokens: BlockTokens = 16,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields the interactive chat of inference-perf's catalogue: users read each answer before they reply.

    A dialogue begins with a shared prompt and its own context (log-normal, mean `context_tokens`). After each answer
    the user thinks for a log-normal time (mean `think_s`, 5 to 300 s). Dialogues begin as a Poisson process with the
    rate rate/turns. `sigma`, the standard deviation of both logarithms, is not published.
    """
    context, think = LogNormal(context_tokens, sigma), LogNormal(think_s, sigma, 5.0, 300.0)
    rng, ids = Random(seed), count()
    shared = Text(ids, block_tokens, shared_tokens)
    for number, at_s in enumerate(poisson_times(rng, rate / turns, duration_s)):
        dialogue, dialogue_turns = Text(ids, block_tokens, context.tokens(rng), shared), list[Arrival]()
        for _ in range(turns):
            turn = dialogue.turn(at_s, question_tokens, answer_tokens, session=f"chat-{number}")
            turn = replace(turn, think_s=think.draw(rng))
            dialogue_turns.append(turn)
            at_s = _nominal_end_s(turn)
        yield chained(dialogue_turns)


def agent_loops(
    *,
    concurrency: Annotated[int, Within(1, 10_000)] = 30,
    conversations: Annotated[int, Within(1, CHAIN_MAX // 20)] = 3,
    shared_tokens: TokensOrNone = 3_000,
    context_tokens_min: Tokens = 15_000,
    context_tokens_max: Tokens = 100_000,
    turns: Annotated[float, Within(2, 20)] = 6.0,
    turns_sigma: Annotated[float, Within(0, 20)] = 3.0,
    input_tokens: Annotated[int, Within(100, 10_000)] = 1_500,
    output_tokens: Annotated[int, Within(50, 4_000)] = 800,
    sigma: Sigma = 0.8,
    think_s: Annotated[float, Within(0, 86_400)] = 0.0,
    ramp_s: Annotated[float, Within(0, 86_400)] = 10.0,
    block_tokens: BlockTokens = 128,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields the code generation of inference-perf's catalogue: agents in closed loops.

    An agent sends its next request `think_s` after an answer, and has `conversations` one after the other. It stops
    after a request without an answer. `concurrency` agents start evenly over `ramp_s`.

    A conversation begins with a shared prompt and its own context (uniform). The number of its requests is normal (2 to
    20). Each request has log-normal input (mean `input_tokens`, 100 to 10,000) and output (mean `output_tokens`, 50 to
    4,000). `turns_sigma` and `sigma` are not published. Raises TraceError.
    """
    check(context_tokens_min, LENGTH_TOKENS_MAX, context_tokens_max=context_tokens_max)
    inputs, outputs = LogNormal(input_tokens, sigma, 100, 10_000), LogNormal(output_tokens, sigma, 50, 4_000)
    rng, ids = Random(seed), count()
    shared = Text(ids, block_tokens, shared_tokens)
    for agent in range(concurrency):
        at_s, loop = agent * ramp_s / concurrency, list[Arrival]()
        for conversation in range(conversations):
            text = Text(ids, block_tokens, rng.randint(context_tokens_min, context_tokens_max), shared)
            for _ in range(min(max(round(rng.gauss(turns, turns_sigma)), 2), 20)):
                session = f"agent-{agent}-{conversation}"
                turn = text.turn(at_s, inputs.tokens(rng), outputs.tokens(rng), session=session)
                loop.append(replace(turn, think_s=think_s))
                at_s = _nominal_end_s(loop[-1])
        yield chained(loop)


def _nominal_end_s(turn: Arrival) -> float:
    return turn.at_s + turn.output_tokens * NOMINAL_TOKEN_S + turn.think_s
