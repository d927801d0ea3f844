"""What the outlier detection remembers of one backend and of each stream on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

from llmproxy.core.backends.adapter_loads import PendingLoads
from llmproxy.core.domain import Reading
from llmproxy.core.estimates.learning import follow_ratio, gain

RATIO_MOST = 2.0
"""An observation counts as at most so many times the mean, so that a slow backend does not become usual at once."""
USUAL_GAIN = 0.05
"""Weight of a newer judgement in the usual speed: about the last twenty decide."""
SLOW_SPAN_S = 1.0
"""The most that one judgement adds to the slow time of a backend."""
RECENT = 3
"""Number of judgements whose median is the pace of a backend: a single one may be chance."""
SLOW_WITHIN_S = 6.0
"""Slow spans add up while no more than this lies between the first and the newest of them."""


def follow_robustly(mean: float, observed: float, weight: float) -> float:
    """A geometric mean after one more observation, which counts as at most `RATIO_MOST` times the mean."""
    return follow_ratio(mean, observed, weight, 1.0 / RATIO_MOST, RATIO_MOST)


@dataclass(slots=True)
class BackendStreams:
    """The streams of one backend, and how fast it is.

    `unstarted` are streams without a byte, the oldest first; `unstarted_tokens` is what has to be computed of their
    prompts, `unstarted_tokens_max` the same if nothing of them is cached. `pending_loads` are adapters that may have to
    be loaded for them. `started` are streams with a byte. `whole` are answers in one piece that have not
    arrived. `last_byte_s` is when any answer last brought something. `ended_s` is when any request last ended.

    `unseen` are requests without a byte that no reading has shown yet, the oldest first. `engine` is a span as of a
    stream that has all tokens which `reading`, the last one, counts. The engine ran `running_s` seconds of sequences
    in it, and `ran` all the time, as far as is known. `generated_s` is when the count last rose, and `paused_s` how
    many seconds it has not risen while the engine ran sequences.

    `computed_tokens` counts the prompt tokens computed so far. `prompts_s` is the time that prompts may have taken
    until `prompts_until_s`, which is when the backend last had no unstarted stream, brought a first byte, or was fast.
    The prompts of the answers in `whole` have `whole_tokens`. They may take up to `whole_s` more seconds, counted from
    `whole_until_s`: the engine computes them one after the other, as it has room.

    The speed of a span is that of the fastest stream since `span_since_s`, as a multiple of the pool's time: one slow
    reader says nothing about an engine. `ratio` assumes that prompts took as long as predicted, `ratio_least` as long
    as they may, which leaves `unexplained_s` of the span, and `ratio_most` no time at all.

    `usual` is the usual `ratio`, over `judgements` of them. `slowness` is the last ratio in multiples of the usual, as
    of `judged_s`, and `others_slowness` that of the rest of the pool, at least 1. `slow_s` is how long the backend was
    too slow since `slow_since_s`. `doubted`: its last observation was far above the usual. `recent` has the last
    pairs of `ratio` and `ratio_least`. `begun_s` is when the backend got its first request.
    """

    pending_loads: PendingLoads
    begun_s: float
    engine: StreamSpan = field(init=False)
    reading: Reading | None = None
    running_s: float = 0.0
    ran: bool = False
    generated_s: float = -inf
    paused_s: float = 0.0
    unseen: dict[int, StreamSpan] = field(default_factory=dict)
    unstarted: dict[int, StreamSpan] = field(default_factory=dict)
    unstarted_tokens: float = 0.0
    unstarted_tokens_max: int = 0
    started: dict[int, StreamSpan] = field(default_factory=dict)
    whole: dict[int, StreamSpan] = field(default_factory=dict)
    last_byte_s: float = -inf
    ended_s: float = -inf
    computed_tokens: float = 0.0
    prompts_s: float = 0.0
    prompts_until_s: float = -inf
    whole_tokens: int = 0
    whole_s: float = 0.0
    whole_until_s: float = -inf
    ratio: float = inf
    ratio_least: float = inf
    ratio_most: float = inf
    usual: float = 1.0
    judgements: int = 0
    slowness: float = 1.0
    judged_s: float = -inf
    others_slowness: float = 1.0
    unexplained_s: float = 0.0
    span_since_s: float = -inf
    slow_s: float = 0.0
    slow_since_s: float = -inf
    doubted: bool = False
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.engine = StreamSpan(self, -inf, 0, 0.0, 0.0, -inf, None, cold=False)

    def pass_whole(self, now: float) -> None:
        """Count the time until `now` as time of prompts of answers in one piece, up to `whole_s`."""
        took_s = min(max(0.0, now - self.whole_until_s), self.whole_s)
        self.prompts_s += took_s
        self.whole_s -= took_s
        self.whole_until_s = max(self.whole_until_s, now)

    def remove_whole(self, lease: int) -> None:
        if (stream := self.whole.pop(lease, None)) is not None:
            self.whole_tokens -= stream.prompt_tokens

    def add_slow_span(self, now: float) -> None:
        if not self.slow_s or now > self.slow_since_s + SLOW_WITHIN_S:
            self.slow_s, self.slow_since_s = 0.0, now
        # A process that was stopped and goes on has one long span, whatever its speed is now.
        self.slow_s += min(self.unexplained_s, now - self.span_since_s, SLOW_SPAN_S)

    def learn_usual(self) -> None:
        """Learn from the last judgement how fast the backend usually is."""
        self.judgements += 1
        self.usual = follow_robustly(self.usual, self.usual * self.slowness, gain(USUAL_GAIN, self.judgements))

    def begin_span(self, now: float) -> None:
        self.ratio = self.ratio_least = self.ratio_most = inf
        self.span_since_s = now

    def uses(self, adapter: str) -> bool:
        """Whether a started stream uses `adapter`, so that it must be resident."""
        return any(one.adapter == adapter for one in self.started.values())


class StreamSpan(Struct, eq=False):
    """A lease with a prompt of `prompt_tokens`, and the span over which its speed is measured.

    `tokens_ahead` had to be computed for its first byte when it was booked, `own_tokens` of them its own. `loads_ahead`
    adapters may have been loaded before its first byte; its own `adapter` is `cold` where it was not believed resident.
    `fetched`: another backend computed the prompt. `whole`: the answer comes in one piece, and the span is all of it.
    `prepared`: the engine has more to do than to tokenise before it shows the request.

    The span began at `since_s`, after `tokens` of the answer. The backend had computed `computed_tokens` and loaded
    `loaded` adapters by then, in at most `prompts_s`. `last_byte_s` is when the stream last brought something.
    """

    backend: BackendStreams
    booked_s: float
    prompt_tokens: int
    own_tokens: float
    tokens_ahead: float
    since_s: float
    adapter: str | None
    cold: bool
    fetched: bool = False
    loads_ahead: int = 0
    tokens: int = 0
    computed_tokens: float = 0.0
    loaded: int = 0
    prompts_s: float = 0.0
    last_byte_s: float = -inf
    sequences: int = 1
    whole: bool = False
    prepared: bool = False

    def begin(self, tokens: int, prompts_s: float, now: float) -> None:
        """Begin a span after so many tokens of the answer."""
        self.since_s, self.tokens, self.prompts_s = now, tokens, prompts_s
        self.computed_tokens, self.loaded = self.backend.computed_tokens, self.backend.pending_loads.done
