"""Outlier detection: finds backends of a pool that hang or have become slow, compared with the other backends.

A frozen worker or a throttled GPU still answers polls, but its streams stop, its counter of generated tokens increases
slowly, and its answers come late. These signs are compared with predictions, with the backend's own past and with the
rest of its pool, under every placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from statistics import median, median_low

from llmproxy.core.backends.adapter_loads import LongestLoad, PendingLoads
from llmproxy.core.backends.hang_detection import HangDetection
from llmproxy.core.backends.health import Hang, Peers
from llmproxy.core.backends.stream_progress import RECENT, BackendStreams, StreamSpan, follow_robustly
from llmproxy.core.domain import DECODE, Placed, Reading, Request, Usage
from llmproxy.core.estimates.line import JITTER_S, USUAL_TOKENS, LearnedLine
from llmproxy.core.settings import HealthSettings

CHECK_S = 0.25  # Minimum time between two checks of the pool.
SPAN_S = 0.5  # Minimum time between two observations of a stream's speed, and between two judgements.
JUDGEMENTS_MIN = 10  # Judgements after which the usual speed of a backend is known.
CROWD = 100.0
"""Number of sequences that doubles the time of a step. It is not learned, because a slow backend collects sequences
and would teach a value that excuses it."""
BASE_TOKENS = 300.0
"""Maximum fixed time before a first byte, in prompt tokens. Short prompts alone cannot separate fixed time from time
per token, and a long prompt must not look like a hang."""
GAIN = 0.02  # Weight of a new observation of the pool's step.
DOUBTFUL = 2.0  # An observation above this multiple of the backend's usual ratio teaches nothing about the pool.
SLOW_S = 2.0  # Slow time after which a backend is ejected. Less may be garbage collection or long prompts.
PROMPT_LATE = 2.0  # An uncached prompt explains up to this multiple of its predicted time.
PROMPTS_MOST = 0.3  # A span with a larger share of prefills, which is an estimate, teaches nothing about the step.
PROMPTS_NEARLY_ALL = 0.7  # A span with a larger share of prefills teaches nothing about its backend either.
KV_CROWDED = 0.9  # KV cache usage from which an engine may preempt sequences and recompute them.
FRESH_S = 5.0  # Maximum age of a judgement of another backend in a comparison.
LEARNING_S = 30.0  # Time after its first request in which a busy backend without a pace counts as learning.
GAP_S = 2.5  # Readings further apart are not compared, because the machine or the network paused between them.


class OutlierDetection:
    """Finds slow and hung backends from the requests and scrapes of one pool. The class changes no backend itself.

    **Hung**: see `HangDetection`.

    **Slow**: a backend takes `slow_factor` times its usual time, relative to the median slowdown of the other backends,
    for SLOW_S seconds in total. Its time is the time of its fastest stream, the time of its engine by the counter of
    tokens, or the time of a non-streamed answer if the engine counts no tokens. A backend that was always slow is no
    outlier, and neither is a backend of a pool that slows down as a whole. Time that uncached prefills may explain does
    not count. (Huang et al., "Gray Failure: The Achilles' Heel of Cloud-Scale Systems", HotOS 2017.)

    Two times are predicted for the pool: from the grant to the first byte, given the prompt tokens to compute before
    it, and per token of a stream. They are learned from normal observations only, because a backend that becomes slow
    must not define the normal speed. So neither `PoolRates` nor `FirstToken` can be used here.
    """

    def __init__(self, settings: HealthSettings, peers: Peers) -> None:
        self._settings = settings
        self._peers = peers
        self._backends: dict[str, BackendStreams] = {}
        self._streams: dict[int, StreamSpan] = {}
        self._longest_load = LongestLoad()
        self._prefill = LearnedLine(BASE_TOKENS / 15_000, 1 / 15_000, USUAL_TOKENS, JITTER_S, 1.0 / BASE_TOKENS)
        self._hangs = HangDetection(settings, peers, self._backends, self._prefill)
        self._step_s = 0.01
        self.check_s = -inf
        self._judge_s = -inf

    def reconfigure(self, settings: HealthSettings) -> None:
        self._settings = self._hangs.settings = settings

    # --- events of leases ----------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, cold: bool, now: float) -> None:
        """Records a granted lease. `cold`: the adapter probably has to be loaded."""
        backend = self._backends.get(placed.backend)
        if backend is None:
            backend = self._backends[placed.backend] = BackendStreams(PendingLoads(self._longest_load), now)
        # The estimated length of a prompt may be below its cached tokens.
        own_tokens = max(0.0, float(request.prompt_tokens - placed.cached_tokens))
        fetched = request.stage is DECODE
        if fetched:
            # If the KV transfer fails and the prompt is computed here, `prompt_tokens` explains the time.
            own_tokens = 0.0
        adapter = request.adapter
        stream = StreamSpan(
            backend, now, request.prompt_tokens, own_tokens, backend.unstarted_tokens + own_tokens, now, adapter, cold,
            fetched, computed_tokens=backend.computed_tokens, loaded=backend.pending_loads.done,
            sequences=request.sequences, whole=not request.stream, prepared=request.prepared,
        )  # fmt: skip
        self._streams[lease] = backend.unseen[lease] = stream
        if not request.stream:
            backend.whole[lease] = stream
            # The first token of a non-streamed answer is invisible, but the prefill takes time.
            stream.prompts_s = self._prompts_s(backend, now)
            backend.computed_tokens += own_tokens
            backend.whole_tokens += request.prompt_tokens
            backend.whole_s += PROMPT_LATE * request.prompt_tokens * self._prefill.slope
            if cold:
                backend.prompts_s += self._longest_load.explained_s(1)
                backend.pending_loads.add_unseen(now)
                backend.pending_loads.done += 1
            return
        self._hangs.due_s = min(self._hangs.due_s, now + self._settings.hung_s)
        backend.unstarted_tokens += own_tokens
        backend.unstarted_tokens_max += request.prompt_tokens
        if not backend.unstarted:
            backend.prompts_until_s = now
        backend.unstarted[lease] = stream
        # Residency is only an estimate. A started stream proves it.
        if adapter is not None and (cold or not backend.uses(adapter)):
            backend.pending_loads.add(lease, cold, now)
        stream.loads_ahead = len(backend.pending_loads)

    def committed(self, lease: int, now: float) -> None:
        """Notes that the first byte of a stream, token or not, was sent to the client."""
        stream = self._streams.get(lease)
        if stream is not None and not stream.whole:
            self._first_byte(lease, stream, now)

    def started(self, lease: int, now: float) -> None:
        """Notes the first token of a stream, or the first bytes of a non-streamed answer."""
        stream = self._streams.get(lease)
        if stream is None:
            return
        if stream.whole:
            stream.backend.unseen.pop(lease, None)
            stream.backend.remove_whole(lease)
            stream.backend.last_byte_s = stream.last_byte_s = now
            return
        if not (stream.fetched or stream.backend.doubted or stream.loads_ahead or stream.backend.pending_loads):
            self._prefill.learn(stream.tokens_ahead, now - stream.booked_s)
        self._first_byte(lease, stream, now)
        stream.begin(1, self._prompts_s(stream.backend, now), now)

    def _first_byte(self, lease: int, stream: StreamSpan, now: float) -> None:
        backend = stream.backend
        since_s = backend.last_byte_s
        backend.unseen.pop(lease, None)
        backend.last_byte_s = stream.last_byte_s = now
        backend.started[lease] = stream
        if lease in backend.unstarted:
            prompts_s = self._prefill.at(backend.unstarted_tokens)
            self._remove_unstarted(lease, stream, now)
            backend.computed_tokens += stream.own_tokens
            backend.pending_loads.first_byte(lease, since_s, prompts_s, now)

    def _remove_unstarted(self, lease: int, stream: StreamSpan, now: float) -> None:
        backend = stream.backend
        backend.prompts_s, backend.prompts_until_s = self._prompts_s(backend, now), now
        del backend.unstarted[lease]
        backend.unstarted_tokens -= stream.own_tokens
        backend.unstarted_tokens_max -= stream.prompt_tokens

    def _prompts_s(self, backend: BackendStreams, now: float) -> float:
        """Returns the seconds that prefills may have taken on a backend so far."""
        backend.pass_whole(now)
        if not backend.unstarted:
            return backend.prompts_s
        # The prefix may not be cached, and any of the prompts may be in prefill now.
        longest = max([stream.prompt_tokens for stream in backend.unstarted.values()])
        at_most_s = PROMPT_LATE * longest * self._prefill.slope
        at_most_s += backend.pending_loads.explained_s(backend.prompts_until_s)
        return backend.prompts_s + min(max(0.0, now - backend.prompts_until_s), at_most_s)

    def progress(
        self, lease: int, output_tokens: int, sequences: int, kv_used: float | None, now: float
    ) -> bool | None:
        """Records the tokens of a stream so far. Returns whether the backend is fast; None if it is too early to say.

        `sequences` are in flight on the backend, and `kv_used` is the usage of its KV cache (0..1), None if unknown.
        """
        stream = self._streams.get(lease)
        if stream is None or stream.whole:
            # The span of a non-streamed answer is the whole answer.
            return None
        backend = stream.backend
        backend.last_byte_s = stream.last_byte_s = now
        backend.started[lease] = stream
        if now - stream.since_s < SPAN_S or output_tokens <= stream.tokens:
            return None
        return self._observed(stream, output_tokens, sequences, kv_used, now)

    def read(self, name: str, reading: Reading, sequences: int) -> bool | None:
        """Learns from a scrape. Returns whether the backend is fast; None if it is too early to say."""
        backend, now = self._backends.get(name), reading.taken_at_s
        if backend is None:
            return None
        before, backend.reading = backend.reading, reading
        self._hangs.see(backend, before, reading, sequences)
        engine = backend.engine
        if (
            before is None
            or before.generated is None
            or reading.generated is None
            or reading.generated < before.generated
            or now > before.taken_at_s + GAP_S
        ):
            engine.since_s = -inf
            return None
        if engine.since_s == -inf or not (before.running or reading.running):
            engine.begin(reading.generated, self._prompts_s(backend, now), now)
            backend.running_s = 0.0
            backend.ran = reading.running > 0
            return None
        backend.running_s += 0.5 * (before.running + reading.running) * (now - before.taken_at_s)
        backend.ran = backend.ran and reading.running > 0
        took_s, tokens = now - engine.since_s, reading.generated - engine.tokens
        if took_s < SPAN_S or tokens <= 0:
            return None
        running = backend.running_s / took_s
        # Per sequence, like the tokens of a stream.
        engine.tokens = 0
        fast = self._observed(engine, tokens / running, running, reading.kv_used, now, sure=backend.ran)
        engine.tokens, backend.running_s, backend.ran = reading.generated, 0.0, reading.running > 0
        return fast

    def _observed(
        self, stream: StreamSpan, output_tokens: float, sequences: float, kv_used: float | None, now: float,
        *, sure: bool = True,
    ) -> bool | None:  # fmt: skip
        """Ends a measured span of a stream or an engine. Returns whether the backend was fast; None if unknown.

        `output_tokens` were generated so far, with about `sequences` in the batch. `kv_used` is the usage of the KV
        cache (0..1). If not `sure`, the engine may have been idle for a part of the span.
        """
        backend, took_s, tokens = stream.backend, now - stream.since_s, output_tokens - stream.tokens
        # Only the first unstarted prompt can have taken time already.
        first = next(iter(backend.unstarted.values()), None)
        first_tokens, loading = (first.own_tokens, first.cold) if first is not None else (0.0, False)
        prompts_s = (backend.computed_tokens - stream.computed_tokens + first_tokens) * self._prefill.slope
        prompts_s += (backend.pending_loads.done - stream.loaded + loading) * self._longest_load.load_s
        so_far_s = self._prompts_s(backend, now)
        unexplained_s = max(0.0, took_s - (so_far_s - stream.prompts_s))
        stream.begin(round(output_tokens), so_far_s, now)
        if (kv_used or 0.0) > KV_CROWDED:
            # The engine may be recomputing preempted sequences.
            backend.slow_s = 0.0
            return None
        steps = tokens * (1.0 + sequences / CROWD)
        least, most = unexplained_s / (steps * self._step_s), took_s / (steps * self._step_s)
        if not sure:
            least = 0.0
        if least < backend.ratio_least:
            backend.ratio_least, backend.unexplained_s = least, unexplained_s
        backend.ratio_most = min(backend.ratio_most, most)
        bound = self._settings.slow_factor * backend.usual * backend.others_slowness
        fast = None if least < bound <= most else most < bound
        if fast:
            # No prefill took place: the unstarted prompts wait for room, and their prefill is still to come.
            backend.prompts_s, backend.prompts_until_s = so_far_s, now
            backend.whole_s = PROMPT_LATE * backend.whole_tokens * self._prefill.slope
        if prompts_s > PROMPTS_NEARLY_ALL * took_s:
            return fast
        ratio = took_s / (steps * self._step_s + prompts_s)
        backend.ratio = min(backend.ratio, ratio)
        backend.doubted = backend.judgements >= JUDGEMENTS_MIN and ratio > DOUBTFUL * backend.usual
        if not backend.doubted and prompts_s <= PROMPTS_MOST * took_s:
            self._step_s = follow_robustly(self._step_s, (took_s - prompts_s) / steps, GAIN)
        return fast

    def finished(self, lease: int, now: float, usage: Usage | None = None, sequences: int = 1) -> None:
        """Records the end of a lease, after which `sequences` are in flight on the backend.

        `usage` is None if the request failed or its tokens are unknown.
        """
        stream = self._streams.pop(lease, None)
        if stream is None:
            return
        backend, loads = stream.backend, stream.backend.pending_loads
        backend.ended_s = now
        backend.unseen.pop(lease, None)
        if stream.whole:
            if lease in backend.whole:
                backend.remove_whole(lease)
            uncounted = backend.reading is None or backend.reading.generated is None
            if uncounted and usage is not None and usage.output_tokens and stream.last_byte_s > stream.booked_s:
                tokens = usage.output_tokens / stream.sequences
                self._observed(stream, tokens, sequences, None, stream.last_byte_s)
            return
        backend.started.pop(lease, None)
        if lease in backend.unstarted:
            self._remove_unstarted(lease, stream, now)
        loads.ended(lease, now)
        if stream.adapter is not None and not backend.uses(stream.adapter):
            # The adapter may be evicted before its later requests.
            for other, one in backend.unstarted.items():
                if one.adapter == stream.adapter and other not in loads:
                    loads.add(other, one.cold, now)

    def forget(self, backend: str) -> None:
        """Removes a backend that left, or whose process is gone or replaced.

        Its open leases still teach the estimates of the pool, but no longer count for a backend of this name.
        """
        self._backends.pop(backend, None)

    # --- the judgement -------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float | None:
        """The earliest time at which a present silence becomes too long; None if no silence can."""
        known = self._hangs.due_s < inf and len(self._peers.members) > 1
        return max(self._hangs.due_s, self.check_s) if known else None

    def outliers(self, now: float) -> tuple[dict[str, Hang], dict[str, str]]:
        """Returns the hung backends and the slow backends of the pool, each with the evidence.

        The scheduler calls this through `PoolBackends.eject_outliers`, and wakes up at `due_s`. Both are empty if the
        last check was less than CHECK_S ago or the pool has a single backend.
        """
        if now < self.check_s:
            return {}, {}
        self.check_s, self._hangs.due_s = now + CHECK_S, inf
        if len(self._peers.members) < 2:
            return {}, {}
        hung = {}
        for name in self._backends:
            if (hang := self._hangs.hang(name, now)) is not None:
                hung[name] = hang
        return hung, self._judge(now) if now >= self._judge_s else {}

    def give_up(self, backend: str, hang: Hang, now: float) -> Iterator[int]:
        """Returns the leases of a hung backend to revoke: streams without a byte; all leases if `hang` is proved.

        Non-streamed requests are also revoked if scrapes or unanswered polls suggest that nothing works on them.
        """
        streams = self._backends[backend]
        unstarted, streams.unstarted = streams.unstarted, {}
        if self._hangs.idle(streams, now):
            unstarted |= streams.unseen
        if self._hangs.stuck(streams, now) or self._peers.members[backend].unanswered_s < inf:
            unstarted |= streams.whole
        if hang.proved:
            # A stream that sends another byte is added again.
            unstarted |= streams.started
            streams.started = {}
        for lease in unstarted:
            streams.unseen.pop(lease, None)
            streams.remove_whole(lease)
        streams.pending_loads.clear()
        streams.unstarted_tokens, streams.unstarted_tokens_max = 0.0, 0
        return iter(unstarted)

    def _judge(self, now: float) -> dict[str, str]:
        """Ends the current span of all backends. Returns the backends that were slow for SLOW_S, with the reason."""
        self._judge_s = now + SPAN_S
        for backend in self._backends.values():
            if backend.ratio < inf:
                backend.slowness, backend.judged_s = backend.ratio / backend.usual, now
        fresh = {name: one.slowness for name, one in self._backends.items() if one.judged_s > now - FRESH_S}
        slow = {}
        for name, backend in self._backends.items():
            others = [slowness for other, slowness in fresh.items() if other != name]
            backend.others_slowness = max(1.0, median_low(others)) if others else 1.0
            if backend.ratio_most == inf:
                continue
            bound = self._settings.slow_factor * backend.usual * backend.others_slowness if others else inf
            ejected, least = self._peers.members[name].ejected, backend.ratio_least
            if ejected:
                # Measurements before an ejection say nothing about the backend after it.
                backend.recent.clear()
            elif backend.ratio < inf:
                backend.recent.append((backend.ratio, least))
            if not ejected and (backend.judgements < JUDGEMENTS_MIN or backend.ratio_most < bound):
                backend.slow_s = 0.0
                if backend.ratio < inf:
                    backend.learn_usual()
            elif not ejected and least >= bound:
                backend.add_slow_span(now)
            backend.begin_span(now)
            if backend.slow_s >= SLOW_S:
                backend.slow_s = 0.0
                slow[name] = f"slow: {least * self._settings.slow_factor / bound:.1f} times as slow as usual"
        return slow

    def paces(self, now: float) -> dict[str, float | None]:
        """Returns the speed factor of each backend: its time for the same work relative to the pool; None at first.

        The factor is the median of the last RECENT ratios of a backend, divided by the lower median of these values in
        the pool. Time that prefills may explain does not raise it above 1. Backends without a measurement within
        FRESH_S are left out, and so is the only backend of a pool.
        """
        if len(self._peers.members) < 2:
            return {}
        at_work = {id(stream.backend) for stream in self._streams.values()}
        paces: dict[str, float | None] = {
            name: None
            for name, one in self._backends.items()
            if len(one.recent) < RECENT and now < one.begun_s + LEARNING_S and id(one) in at_work
        }
        known = {
            name: [median(ratios) for ratios in zip(*one.recent, strict=True)]
            for name, one in self._backends.items()
            if len(one.recent) == RECENT and one.judged_s > now - FRESH_S
        }
        if len(known) > 1:
            usual = median_low([ratio for ratio, _ in known.values()])
            paces |= {name: max(min(1.0, ratio / usual), least / usual) for name, (ratio, least) in known.items()}
        return paces

    def check(self) -> None:
        for one in self._backends.values():
            assert abs(one.unstarted_tokens - sum(stream.own_tokens for stream in one.unstarted.values())) < 1e-3
            assert one.whole_tokens == sum(stream.prompt_tokens for stream in one.whole.values())
            assert one.unstarted_tokens_max == sum(stream.prompt_tokens for stream in one.unstarted.values())
            assert one.unstarted.keys() | one.started.keys() | one.whole.keys() <= self._streams.keys()
