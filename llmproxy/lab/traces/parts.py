"""Parts of generators: growing texts, lengths, arrival processes and checks of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, log
from random import Random
from typing import Annotated, Any, NamedTuple

from llmproxy.lab.traces.arrival import Arrival, TraceError
from llmproxy.lab.traces.formats import BLOCK_TOKENS_MAX, LENGTH_TOKENS_MAX, TIME_MAX_S


class Text:
    """A text that only grows, such as a dialogue, and the ids of its blocks.

    A text after a `beginning` shares the full blocks that the other text has at that moment. All further blocks get new
    ids from `ids`. A partial block keeps its id while it grows. `tokens` is the length without `beginning`.
    """

    def __init__(self, ids: Iterator[int], block_tokens: int, tokens: int, beginning: Text | None = None) -> None:
        self._ids = ids
        self._block_tokens = block_tokens
        self.tokens: int = beginning.tokens if beginning else 0
        self._blocks: list[int] = beginning._blocks[: beginning.tokens // block_tokens] if beginning else []
        self.grow(tokens)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        while len(self._blocks) * self._block_tokens < self.tokens:
            self._blocks.append(next(self._ids))

    def blocks(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def turn(self, at_s: float, question_tokens: int, answer_tokens: int, **facts: Any) -> Arrival:
        """Returns the arrival of a question after the text so far. Question and answer are added to the text."""
        self.grow(question_tokens)
        prompt_tokens = self.tokens
        self.grow(answer_tokens)
        return Arrival(at_s, prompt_tokens, answer_tokens, self.blocks(), **facts)


# --- lengths ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution with this mean and this standard deviation of its logarithm, clamped to low..high."""

    mean: float
    sigma: float
    low: float = 1.0
    high: float = float(LENGTH_TOKENS_MAX)

    def draw(self, rng: Random) -> float:
        value = exp(rng.gauss(log(self.mean) - self.sigma**2 / 2, self.sigma))
        return min(max(value, self.low), self.high)

    def tokens(self, rng: Random) -> int:
        return round(self.draw(rng))


# --- arrival processes ------------------------------------------------------------------------------------------------


def gamma_times(rng: Random, rate: float, cv: float, until_s: float) -> Iterator[float]:
    """Yields times below `until_s` with Gamma-distributed gaps; 1 as coefficient of variation `cv` is Poisson."""
    shape = 1 / cv**2
    at_s = rng.gammavariate(shape, 1 / (rate * shape))
    while at_s < until_s:
        yield at_s
        at_s += rng.gammavariate(shape, 1 / (rate * shape))


def poisson_times(rng: Random, rate: float, until_s: float) -> Iterator[float]:
    return gamma_times(rng, rate, 1.0, until_s)


def varying_times(rng: Random, rate_at: Callable[[float], float], rate_max: float, until_s: float) -> Iterator[float]:
    """Yields Poisson times with a rate of `rate_at`, at most `rate_max`, by thinning (Lewis and Shedler)."""
    for at_s in poisson_times(rng, rate_max, until_s):
        if rng.random() * rate_max < rate_at(at_s):
            yield at_s


# --- parameters -------------------------------------------------------------------------------------------------------


class Within(NamedTuple):
    """The range of a generator's parameter. `generate` checks it before the call."""

    low: float
    high: float


Rate = Annotated[float, Within(1e-6, 1e6)]
Seconds = Annotated[float, Within(1e-3, TIME_MAX_S)]
Tokens = Annotated[int, Within(1, LENGTH_TOKENS_MAX)]
TokensOrNone = Annotated[int, Within(0, LENGTH_TOKENS_MAX)]
BlockTokens = Annotated[int, Within(1, BLOCK_TOKENS_MAX)]
Sigma = Annotated[float, Within(0, 10)]
Share = Annotated[float, Within(0, 1)]


def check(low: float, high: float, **given: float) -> None:
    """Raises TraceError for a parameter outside low..high, or NaN."""
    for name, value in given.items():
        if not low <= value <= high:
            raise TraceError(f"{name} is {value:g}; should be {low:,.12g} to {high:,.12g}")
