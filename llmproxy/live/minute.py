"""What ended within the last minute: waits and first tokens by band, tokens by backend and by flow, outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from llmproxy.core.domain import Outcome
from llmproxy.telemetry.exit import RequestExit
from llmproxy.telemetry.sketch import Sketch

SLICE_S = 5
SLICES = 12
FLOWS_MAX = 1_000
"""Flows counted within one slice, `OTHER` included."""
OTHER = "other"
NO_BAND = "none"

KINDS = ("completed", "refused", "failed", "cancelled", "client_error")
"""How a request ends, see `kind_of`."""
REFUSED = frozenset(
    {
        Outcome.REJECTED_CAPACITY,
        Outcome.REJECTED_NO_BACKENDS,
        Outcome.REJECTED_DEADLINE,
        Outcome.RATE_LIMITED,
        Outcome.EXPIRED,
        Outcome.EXPIRED_NO_BACKENDS,
        Outcome.SHED,
        Outcome.DRAINING,
    }
)
CLIENT_ERRORS = frozenset({Outcome.BAD_REQUEST, Outcome.UNKNOWN_MODEL, Outcome.UNAUTHORIZED, Outcome.TOO_LARGE})


def kind_of(ended: RequestExit) -> str:
    """How it ended, in five kinds: `completed`, `refused` by the proxy, `client_error`, `cancelled`, else `failed`.

    An engine's own answer of 4xx is the client's error.
    """
    outcome = ended.result.outcome
    if outcome is Outcome.COMPLETED:
        return "completed"
    if outcome in REFUSED:
        return "refused"
    if outcome in CLIENT_ERRORS or (outcome is Outcome.UPSTREAM_STATUS and 400 <= ended.result.status < 500):
        return "client_error"
    return "cancelled" if outcome is Outcome.CANCELLED else "failed"


class Slice:
    """What ended within a few seconds. Sketches are by band, flows by (band, flow), the others by backend."""

    def __init__(self) -> None:
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.objectives: Counter[tuple[str, bool]] = Counter()
        self.wait_s: defaultdict[str, Sketch] = defaultdict(Sketch)
        self.ttft_s: defaultdict[str, Sketch] = defaultdict(Sketch)
        self.tpot_s: defaultdict[str, Sketch] = defaultdict(Sketch)
        self.flow_tokens: Counter[tuple[str, str]] = Counter()
        self.flow_ends: Counter[tuple[str, str]] = Counter()
        self.weights: dict[tuple[str, str], float] = {}
        self.prompt_tokens: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()
        self.expected_tokens: Counter[str] = Counter()
        self.cached_tokens: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.retries = 0
        self.preemptions = 0
        self.error_ratio = 0.0
        self.errors = 0

    def add(self, ended: RequestExit) -> None:
        asked, routing, result = ended.input, ended.routing, ended.result
        band, kind = asked.band or NO_BAND, kind_of(ended)
        self.kinds[band, kind] += 1
        if result.met is not None:
            self.objectives[band, result.met] += 1
        if routing.queue_wait_s is not None:
            self.wait_s[band].add(max(0.0, routing.queue_wait_s))
        if asked.stream and result.ttft_s is not None:
            self.ttft_s[band].add(max(0.0, result.ttft_s))
        if (tpot_s := ended.time_per_output_token_s) is not None:
            self.tpot_s[band].add(max(0.0, tpot_s))
        if asked.flow is not None:
            flow = (band, asked.flow)
            if flow not in self.flow_ends and len(self.flow_ends) >= FLOWS_MAX - 1:
                flow = (band, OTHER)
            self.flow_ends[flow] += 1
            self.weights[flow] = asked.weight
            self.flow_tokens[flow] += max(0, result.prompt_tokens or 0) + max(0, result.output_tokens or 0)
        if routing.attempts:
            self.retries += max(0, routing.attempts - routing.preemptions - 1)
            self.preemptions += routing.preemptions
        last = routing.last
        backend = last.backend
        if backend is None:
            return
        self.ends[backend] += 1
        self.failures[backend] += kind == "failed"
        self.prompt_tokens[backend] += max(0, result.prompt_tokens or 0)
        self.output_tokens[backend] += max(0, result.output_tokens or 0)
        if result.cached_tokens is not None:
            self.cached_tokens[backend] += max(0, result.cached_tokens)
            self.expected_tokens[backend] += max(0, last.expected_cached_tokens or 0)
        predicted, observed_s = last.predicted_ttft, ended.backend_ttft_s
        if predicted is not None and observed_s is not None and observed_s > 0.0:
            self.error_ratio += predicted.error_ratio(observed_s)
            self.errors += 1

    def merge(self, other: Slice) -> None:
        for name in ("kinds", "objectives", "flow_tokens", "flow_ends", "prompt_tokens", "output_tokens",
                     "expected_tokens", "cached_tokens", "ends", "failures"):  # fmt: skip
            getattr(self, name).update(getattr(other, name))
        for name in ("wait_s", "ttft_s", "tpot_s"):
            sketches = getattr(self, name)
            for band, sketch in getattr(other, name).items():
                sketches[band].merge(sketch)
        self.weights.update(other.weights)
        for name in ("retries", "preemptions", "error_ratio", "errors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Minute:
    """The slices of the last minute, of which the newest grows; they reach back 55 to 60 s."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, Slice]] = deque(maxlen=SLICES)
        self._began_s: int | None = None
        self.total = Slice()
        self.span_s = 1.0

    def add(self, second: int, ended: Iterable[RequestExit]) -> None:
        """Count what ended within this second, and renew `total`, which holds for the last `span_s` seconds."""
        number = second // SLICE_S
        self._began_s = second if self._began_s is None else self._began_s
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, Slice()))
        newest = self._slices[-1][1]
        for one in ended:
            newest.add(one)
        while self._slices[0][0] <= number - SLICES:
            self._slices.popleft()
        self.total = Slice()
        for _, part in self._slices:
            self.total.merge(part)
        first_s = max((number - SLICES + 1) * SLICE_S, self._began_s)
        self.span_s = float(max(1, second - first_s + 1))
