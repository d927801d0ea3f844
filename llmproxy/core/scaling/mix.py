"""The arrivals of a pool by size class, and the tokens of each class's requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from llmproxy.core.domain import Usage
from llmproxy.core.estimates.learning import follow

LONG_S = 120
SHORT_S = 30
TREND_S = 60
HISTORY_S = 180  # Age of the oldest arrivals in use: two windows of `TREND_S`, `LONG_S` apart, give the trend.
GAIN = 1 / 50
SEEN_MIN = 3  # Number of answers of a size class after which its mean output tokens are used.
BLOCK = 10  # Answers in a block. A block that clearly differs replaces the mean: the traffic has changed.
BLOCK_SIGMAS = 3.0
RESTORED_MAX = 50  # Largest weight, in answers, of a size class that an earlier process learned.
SIZES_MAX = 64
SLOT_S = 5  # Length in seconds of the slots in which arrivals are counted. All windows are multiples of SLOT_S.
HISTORY_SLOTS = HISTORY_S // SLOT_S


@dataclass(slots=True)
class SizeClass:
    """Requests whose prompt lengths, in tokens, have the same number of binary digits."""

    seen: int = 0
    output_tokens: float = 0.0  # Mean output tokens of an answer.
    output_squares: float = 0.0  # Mean of the squared output tokens of an answer.
    cached_share: float = 0.0  # Cached share of the prompt tokens, 0..1.
    # Number of answers in the current block, which has at most `BLOCK`. The fields below are sums over this block.
    block: int = 0
    block_tokens: float = 0.0
    block_squares: float = 0.0

    def learn(self, output_tokens: float, weight: float) -> None:
        self.output_tokens += weight * (output_tokens - self.output_tokens)
        self.output_squares += weight * (output_tokens * output_tokens - self.output_squares)
        self.block += 1
        self.block_tokens += output_tokens
        self.block_squares += output_tokens * output_tokens
        if self.block == BLOCK:
            mean, squares = self.block_tokens / BLOCK, self.block_squares / BLOCK
            variances = max(0.0, self.output_squares - self.output_tokens**2) + max(0.0, squares - mean**2)
            # Welch's test: a single long answer proves nothing, because it makes the variance of its block large.
            if abs(mean - self.output_tokens) > BLOCK_SIGMAS * sqrt(variances / BLOCK):
                self.seen, self.output_tokens, self.output_squares = BLOCK, mean, squares
            self.block, self.block_tokens, self.block_squares = 0, 0.0, 0.0


@dataclass(slots=True)
class Count:
    """Requests of a size class and their prompt tokens."""

    requests: float = 0.0
    prompt_tokens: float = 0.0


Sizes = Mapping[int, Count]


def size_class(prompt_tokens: int) -> int:
    """Returns the size class of a prompt: the number of binary digits of its length in tokens."""
    return max(1, prompt_tokens).bit_length()


class Tokens(NamedTuple):
    """The expected tokens of a number of requests, in sum."""

    requests: float
    prompt: float  # All prompt tokens, cached ones too.
    compute: float  # Uncached prompt tokens, which the engines must compute.
    before: float  # Mean number of earlier tokens that an uncached token attends to.
    output: float
    kv_tokens: float  # Tokens of prompt and answer that a request occupies in the KV cache, averaged over its time.


NO_TOKENS = Tokens(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class _Window:
    """Running sums over the slots from `begin` to `end` slots ago. They stay exact, because counts are integers."""

    __slots__ = ("_at", "_begin", "_end", "_totals")

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self._at: int | None = None
        self._totals: dict[int, list[float]] = {}

    def totals(self, slots: Mapping[int, Mapping[int, Count]], current: int) -> Mapping[int, Sequence[float]]:
        """Maps size classes to [requests, prompt tokens], summed over the window, as counted back from `current`."""
        if self._at is None or not 0 <= current - self._at < HISTORY_SLOTS:
            self._totals = {}
            self._add(slots, range(current - self._begin, current - self._end), 1.0)
        elif current > self._at:
            self._add(slots, range(self._at - self._end, current - self._end), 1.0)
            self._add(slots, range(self._at - self._begin, current - self._begin), -1.0)
        self._at = current
        return self._totals

    def _add(self, slots: Mapping[int, Mapping[int, Count]], which: range, sign: float) -> None:
        for slot in which:
            for size, count in slots.get(slot, {}).items():
                total = self._totals.setdefault(size, [0.0, 0.0])
                total[0] += sign * count.requests
                total[1] += sign * count.prompt_tokens


class Mix:
    """The arrivals of the last minutes by prompt length, and the learned token counts of each length class."""

    def __init__(self) -> None:
        self.sizes: dict[int, SizeClass] = {}
        self._slots: dict[int, dict[int, Count]] = {}  # Slot number -> size class -> arrivals.
        self._windows: dict[tuple[int, int], _Window] = {}  # (Begin, end) seconds ago -> running sums.
        self._counts: dict[int, Count] = {}  # Size class -> arrivals in the current slot.
        self._slot = -1  # The number of the current slot.
        self.first_s: float | None = None  # Time of the first arrival; None before it.
        self.ended = 0  # Answers learned from.
        self.restored = False

    def restore(self, sizes: Sequence[tuple[int, int, float, float]], squares: Sequence[float]) -> bool:
        """Takes over `sizes` (class, answers, mean output tokens, cached share), and mean squares of the output tokens.

        Returns False, and changes nothing, if the values are invalid.
        """
        if len(squares) != len(sizes):
            squares = [tokens * tokens for _, _, tokens, _ in sizes]
        found = {
            size: SizeClass(seen, tokens, square, cached)
            for (size, seen, tokens, cached), square in zip(sizes, squares, strict=True)
        }
        sound = all(
            0 < size <= SIZES_MAX and one.seen > 0 and 0.0 <= one.output_tokens < inf and 0.0 <= one.cached_share <= 1.0
            and one.output_tokens**2 <= one.output_squares * 1.001 < inf
            for size, one in found.items()
        )  # fmt: skip
        if not sound or not found:
            return False
        for one in found.values():
            one.seen = min(one.seen, RESTORED_MAX)
        self.sizes, self.restored = found, True
        return True

    def arrived(self, prompt_tokens: int, now: float) -> None:
        slot = int(now) // SLOT_S
        if slot != self._slot:
            self._slot = slot
            self._counts = {}
            self._slots[slot] = self._counts
            # A window that was not read for a while still has to subtract its old slots.
            while (oldest := next(iter(self._slots))) < slot - 2 * HISTORY_SLOTS:
                del self._slots[oldest]
            if self.first_s is None:
                self.first_s = now
        size = prompt_tokens.bit_length() or 1
        count = self._counts.get(size)
        if count is None:
            count = self._counts[size] = Count()
        count.requests += 1.0
        count.prompt_tokens += prompt_tokens

    def learn(self, usage: Usage) -> None:
        key = size_class(usage.prompt_tokens)
        size = self.sizes.get(key)
        if size is None:
            size = self.sizes[key] = SizeClass()
        size.seen += 1
        self.ended += 1
        weight = max(GAIN, 1.0 / size.seen)
        # A request without output, such as an embedding, takes a step too.
        size.learn(max(1.0, usage.output_tokens), weight)
        if usage.cached_tokens is not None and usage.prompt_tokens > 0:
            size.cached_share = follow(size.cached_share, usage.cached_tokens / usage.prompt_tokens, weight)

    def within(self, now: float, begin_s: int, end_s: int = 0) -> dict[int, Count]:
        """Maps size classes to the arrivals between `begin_s` and `end_s` seconds ago, in whole time slots."""
        current = int(now) // SLOT_S
        totals = self._window(begin_s, end_s).totals(self._slots, current)
        found = {size: Count(*total) for size, total in totals.items() if total[0]}
        for size, count in self._slots.get(current, {}).items() if not end_s else ():
            total = found.setdefault(size, Count())
            total.requests += count.requests
            total.prompt_tokens += count.prompt_tokens
        return found

    def requests_within(self, now: float, begin_s: int, end_s: int = 0) -> float:
        """Returns the number of arrivals between `begin_s` and `end_s` seconds ago."""
        current = int(now) // SLOT_S
        totals = self._window(begin_s, end_s).totals(self._slots, current)
        found = sum(total[0] for total in totals.values())
        return found if end_s else found + total_requests(self._slots.get(current, {}).values())

    def _window(self, begin_s: int, end_s: int) -> _Window:
        found = self._windows.get((begin_s, end_s))
        if found is None:
            found = self._windows[begin_s, end_s] = _Window(begin_s // SLOT_S, end_s // SLOT_S)
        return found

    def span_s(self, now: float, window_s: int) -> float:
        """Returns the seconds that `within(now, window_s)` covers: the window and the current slot; at least 1.

        If the first arrival is more recent, returns the time since then.
        """
        first_s = now if self.first_s is None else self.first_s
        return max(1.0, min(window_s + now % SLOT_S, now - first_s))

    def tokens(self, sizes: Sizes) -> Tokens:
        """Returns the tokens that requests of these sizes will probably need, learned from earlier answers.

        A size class with few answers uses a neighbouring class. Without one, no output tokens are expected.
        """
        if not sizes:
            return NO_TOKENS
        requests = prompt = compute = before = output = held = 0.0
        for size, count in sizes.items():
            learned = self._learned(size)
            prompt += count.prompt_tokens
            cached = count.prompt_tokens * learned.cached_share
            uncached = count.prompt_tokens - cached
            requests += count.requests
            compute += uncached
            before += uncached * (cached + uncached / 2.0) / max(1.0, count.requests)
            output += count.requests * learned.output_tokens
            # An answer that grows to n tokens occupies its prompt and n / 2 tokens on average, for n steps.
            held += count.prompt_tokens * learned.output_tokens + count.requests * learned.output_squares / 2.0
        held = held / output if output else prompt / max(1.0, requests)
        return Tokens(requests, prompt, compute, before / compute if compute else 0.0, output, held)

    def _learned(self, size: int) -> SizeClass:
        found = self.sizes.get(size)
        if found is not None and found.seen >= SEEN_MIN:
            return found
        # The length of a prompt is estimated at arrival and counted at the end. Both may be in neighbouring classes.
        seen = [known for known, one in self.sizes.items() if one.seen >= SEEN_MIN] or self.sizes
        nearest = min(seen, key=lambda known: abs(known - size), default=None)
        if nearest is None:
            return SizeClass()
        other = self.sizes[nearest]
        believed = other.seen >= SEEN_MIN and abs(nearest - size) <= 1
        if not believed:
            return SizeClass(cached_share=other.cached_share)
        return SizeClass(0, other.output_tokens, other.output_squares, other.cached_share)


def total_requests(sizes: Iterable[Count]) -> float:
    return sum(count.requests for count in sizes)
