"""The records of the outlier detection for each backend and each stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

from llmproxy.core.backends.adapter_loads import PendingLoads
from llmproxy.core.domain import Reading
from llmproxy.core.estimates.learning import follow_ratio, gain

RATIO_MOST = 2.0  # An observation counts as at most this multiple or part of the mean, which so follows gradually.
USUAL_GAIN = 0.05  # Weight of a new judgement in the usual speed, which reflects about the last twenty judgements.
SLOW_SPAN_S = 1.0  # Maximum time that one judgement adds to `BackendStreams.slow_s`.
RECENT = 3  # Number of judgements whose median is the pace of a backend, because a single judgement may be chance.
SLOW_WITHIN_S = 6.0  # Period, from the first slow span, in which the time of slow spans is added up.


def follow_robustly(mean: float, observed: float, weight: float) -> float:
    """Returns a geometric mean after one more observation, clipped to 1 / RATIO_MOST .. RATIO_MOST times the mean."""
    return follow_ratio(mean, observed, weight, 1.0 / RATIO_MOST, RATIO_MOST)


@dataclass(slots=True)
class BackendStreams:
    """The streams of one backend, and its measured speed.

    The speed in a span is the time per token of the fastest stream, divided by the pool's time per token. So a larger
    value is slower. Other streams do not count, because a slow reader proves nothing about an engine.
    """

    pending_loads: PendingLoads  # Adapter loads for the unstarted streams.
    begun_s: float  # Time at which the backend got its first request.

    # The engine as seen by readings.
    engine: StreamSpan = field(init=False)  # A virtual stream with all tokens that the readings count.
    reading: Reading | None = None  # The last reading of the backend; None before the first.
    running_s: float = 0.0  # Sequence-seconds that the engine ran in the span of `engine`.
    ran: bool = False  # Whether readings show that the engine ran during the whole span of `engine`.
    generated_s: float = -inf  # Time at which the engine's counter of generated tokens last increased.
    paused_s: float = 0.0  # Seconds without an increase while the engine ran sequences.
    # Requests without a byte that no reading has shown, oldest first.
    unseen: dict[int, StreamSpan] = field(default_factory=dict)

    # Streams by lease.
    # Streams that have sent no byte yet, the oldest first.
    unstarted: dict[int, StreamSpan] = field(default_factory=dict)
    unstarted_tokens: float = 0.0  # Prompt tokens to compute for `unstarted`.
    unstarted_tokens_max: int = 0  # All prompt tokens of `unstarted`, as if nothing were cached.
    started: dict[int, StreamSpan] = field(default_factory=dict)  # Streams that have sent a byte.
    whole: dict[int, StreamSpan] = field(default_factory=dict)  # Non-streamed requests whose answers have not arrived.
    last_byte_s: float = -inf  # When a byte of any answer last arrived.
    ended_s: float = -inf  # When any request last ended.

    # Prefill time that may explain a silence.
    computed_tokens: float = 0.0  # Uncached prompt tokens computed so far. Non-streamed requests count from the grant.
    prompts_s: float = 0.0  # Time that prefill may have taken until `prompts_until_s`.
    prompts_until_s: float = -inf  # When the backend last had no unstarted stream, sent a first byte, or was fast.
    whole_tokens: int = 0  # Prompt tokens of the answers in `whole`.
    whole_s: float = 0.0  # Further prefill time that `whole` may take from `whole_until_s` on.
    whole_until_s: float = -inf

    # The current span: the least measured time divided by the predicted time, under three assumptions about prefill.
    ratio: float = inf  # If prefill took the predicted time.
    ratio_least: float = inf  # `ratio` if prefill took the longest plausible time.
    ratio_most: float = inf  # `ratio` if prefill took no time at all.
    # The judgements of earlier spans.
    usual: float = 1.0  # Usual `ratio`, averaged over `judgements`.
    judgements: int = 0
    slowness: float = 1.0  # The ratio at `judged_s`, divided by the usual ratio.
    judged_s: float = -inf
    others_slowness: float = 1.0  # Median of `slowness` of the other backends of the pool; at least 1.
    unexplained_s: float = 0.0  # The part of the span that the longest plausible prefill does not explain.
    span_since_s: float = -inf
    slow_s: float = 0.0  # Time for which the backend was too slow since `slow_since_s`.
    slow_since_s: float = -inf
    doubted: bool = False  # Whether the last observed time per token was far above the usual time.
    # The last pairs of `ratio` and `ratio_least`.
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.engine = StreamSpan(self, -inf, 0, 0.0, 0.0, -inf, None, cold=False)

    def pass_whole(self, now: float) -> None:
        """Moves the expected prefill time of non-streamed answers to `prompts_s` as it passes."""
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
        # A process that was stopped and continued has a single long span, whatever its speed is now.
        self.slow_s += min(self.unexplained_s, now - self.span_since_s, SLOW_SPAN_S)

    def learn_usual(self) -> None:
        """Updates the usual speed of the backend with the last measured speed."""
        self.judgements += 1
        self.usual = follow_robustly(self.usual, self.usual * self.slowness, gain(USUAL_GAIN, self.judgements))

    def begin_span(self, now: float) -> None:
        self.ratio = self.ratio_least = self.ratio_most = inf
        self.span_since_s = now

    def uses(self, adapter: str) -> bool:
        """Returns whether a started stream uses `adapter`, which proves that the adapter is loaded."""
        return any(one.adapter == adapter for one in self.started.values())


class StreamSpan(Struct, eq=False):
    """A stream, and the span of time over which its speed is measured."""

    backend: BackendStreams
    booked_s: float
    prompt_tokens: int
    own_tokens: float  # Uncached tokens of the stream's prompt.
    tokens_ahead: float  # Prompt tokens to compute before the first byte, with `own_tokens`, at the booking.
    since_s: float  # Start of the span.
    adapter: str | None
    cold: bool  # Whether the adapter probably had to be loaded.
    fetched: bool = False  # Whether another backend computed the prompt.
    loads_ahead: int = 0  # Adapters that the engine may have to load before the first byte.
    tokens: int = 0  # Tokens of the answer at the start of the span.
    computed_tokens: float = 0.0  # The counters of the backend at the start of the span.
    loaded: int = 0
    prompts_s: float = 0.0
    last_byte_s: float = -inf  # When a byte of the stream last arrived.
    sequences: int = 1
    whole: bool = False  # Whether the answer is not streamed. The span is then the whole answer.
    # Whether the engine must do more than tokenise before it counts the request as running or waiting.
    prepared: bool = False

    def begin(self, tokens: int, prompts_s: float, now: float) -> None:
        """Begins a span after `tokens` tokens of the answer."""
        self.since_s, self.tokens, self.prompts_s = now, tokens, prompts_s
        self.computed_tokens, self.loaded = self.backend.computed_tokens, self.backend.pending_loads.done
