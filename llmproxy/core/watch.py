"""Which backends of a pool hang, and which have become slow: judged by what their streams bring, beside the others'.

A worker that is frozen, or a GPU that is throttled, answers polls as ever. What it owes its streams tells: it is held
against what was predicted, its own past and the rest of its pool, whichever placement chose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from statistics import median

from llmproxy.core.domain import Placed, Request
from llmproxy.core.health import Peers
from llmproxy.core.settings import HealthSettings

LOOK_S = 0.25
"""How often the pool is looked over at most."""
SPAN_S = 0.8
"""How long a stream is followed for one observation of its speed, and a backend for one judgement."""
LATE = 5.0
"""Times the predicted time to all first bytes that it owes, after which a silent backend counts as hung."""
KNOWN = 10
"""Judgements after which it is known how fast a backend is as a rule."""
RULE_GAIN = 0.05
"""Weight of a newer one then: the last twenty or so decide."""
STEP_MOST = 2.0
"""Times what is known that one observation counts at most, so that what is slow does not become the rule at once."""
CROWD = 100.0
"""Sequences with which a step takes about twice as long as with one. A line that is learned would be learned from the
slow backend, on which they pile up, and excuse it."""
BASE_TOKENS = 300.0
"""Tokens of a prompt that take as long as all else that a first byte waits for."""
GAIN = 0.02
"""Weight of a newer observation of what the pool takes."""
DOUBTFUL = 2.0
"""Times its rule beyond which an observation is not taken as one of what the pool can do."""
IN_A_ROW = 3
"""Judgements that it takes: one or two may be a collection of garbage, a compilation, a burst of long prompts."""
PROMPTS_MOST = 0.3
"""Share of a span that prompts may explain where it is to tell of speed: how long they take is known roughly."""
KV_CROWDED = 0.9
"""Use of a KV-cache from which on an engine may take sequences out of its batch and compute them again."""
FRESH_S = 5.0
"""How long a judgement of another backend is one to compare with."""


@dataclass(slots=True)
class _Pulse:
    """One backend. `owed` are streams without a byte, the oldest first, `owed_tokens` what is to be computed of their
    prompts, and `owed_at_most_tokens` what is if nothing of them is cached; `heard_s` is when any stream of it last
    brought something.

    `work_tokens` counts the prompt tokens that it has computed so far. `best` is the speed of its fastest stream since
    the last judgement, in times of what is the pool's: one slow reader, or one odd stream, is no news of an
    engine. `rule` is what that is as a rule, over `known` judgements; `slowness`, as of `judged_s`, what the last was
    of it, and `slow` how many in a row were too much. It is `doubted` while its last observation was far off.
    """

    owed: dict[int, _Stream] = field(default_factory=dict)
    owed_tokens: float = 0.0
    owed_at_most_tokens: int = 0
    heard_s: float = -inf
    work_tokens: float = 0.0
    best: float = inf
    rule: float = 1.0
    known: int = 0
    slowness: float = 1.0
    judged_s: float = -inf
    slow: int = 0
    doubted: bool = False

    def learn_rule(self) -> None:
        """The last judgement is one more of how fast it is as a rule."""
        self.known += 1
        self.rule = _nearer(self.rule, self.rule * self.slowness, max(RULE_GAIN, 1.0 / self.known))


@dataclass(slots=True)
class _Stream:
    """A lease, with a prompt of `prompt_tokens`. `ahead_tokens` had to be computed for its first byte when it was
    booked, `own_tokens` of them its own.

    Since `since_s`, when its backend had computed `work_tokens`, it brought all beyond its first `tokens`.
    """

    pulse: _Pulse
    booked_s: float
    prompt_tokens: int
    own_tokens: float
    ahead_tokens: float
    since_s: float
    tokens: int = 0
    work_tokens: float = 0.0


class Watch:
    """Follows the streams of one pool; changes nothing of it.

    **Hung** is a backend that owes first bytes and has been silent for `hung_s`, or `LATE` times as long as all that it
    owes was predicted to take, where others of its pool spoke meanwhile. Streams under way prove nothing: it may be the
    client who does not read. Long prompts explain long silence.

    **Slow** is one whose fastest stream takes `slow_factor` times as long as is its rule, beside the median of the
    others by the same measure, three spans in a row. A pool that slows down as a whole has no outlier, and one that was
    slow from its beginning is another kind of machine, which is for the placement to know. Time that prompts explain
    does not count. (Grey failure: Huang et al., "Gray Failure: The Achilles' Heel of Cloud-Scale Systems", HotOS 2017.)

    What is predicted are the pool's own times: seconds to a first byte over the prompt tokens ahead of it, and seconds
    for each token of a stream.
    """

    def __init__(self, settings: HealthSettings, peers: Peers) -> None:
        self.settings = settings
        self._peers = peers
        self._pulses: dict[str, _Pulse] = {}
        self._streams: dict[int, _Stream] = {}
        self._token_s = 1 / 15_000
        self._step_s = 0.01
        self._common = 1.0
        self._look_s = -inf
        self._judge_s = -inf

    # --- what leases bring ---------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        pulse = self._pulses.setdefault(placed.backend, _Pulse())
        own_tokens = float(request.prompt_tokens - placed.cached_tokens)
        if not request.stream:
            # Nobody sees its first token; that its prompt takes time is all it tells.
            pulse.work_tokens += own_tokens
            return
        pulse.owed_tokens += own_tokens
        pulse.owed_at_most_tokens += request.prompt_tokens
        stream = _Stream(pulse, now, request.prompt_tokens, own_tokens, pulse.owed_tokens, now)
        self._streams[lease] = pulse.owed[lease] = stream

    def committed(self, lease: int, now: float) -> None:
        """A byte went to the client: it cannot be sent elsewhere any more."""
        if lease in self._streams:
            self._speaks(lease, self._streams[lease], now)

    def started(self, lease: int, now: float) -> None:
        """The first token came."""
        stream = self._streams.get(lease)
        if stream is None:
            return
        if not stream.pulse.doubted:
            self._token_s = _nearer(self._token_s, (now - stream.booked_s) / (BASE_TOKENS + stream.ahead_tokens), GAIN)
        self._speaks(lease, stream, now)
        stream.since_s, stream.work_tokens, stream.tokens = now, stream.pulse.work_tokens, 1

    def _speaks(self, lease: int, stream: _Stream, now: float) -> None:
        pulse = stream.pulse
        pulse.heard_s = now
        if pulse.owed.pop(lease, None) is not None:
            pulse.owed_tokens -= stream.own_tokens
            pulse.owed_at_most_tokens -= stream.prompt_tokens
            pulse.work_tokens += stream.own_tokens

    def progress(
        self, lease: int, output_tokens: int, sequences: int, kv_used: float | None, now: float
    ) -> bool | None:
        """A stream has about so many tokens by now, beside `sequences` that its backend has in all.

        Answers whether its backend is as fast as it should be; None where it is too early to say.
        """
        stream = self._streams.get(lease)
        if stream is None:
            return None
        pulse = stream.pulse
        pulse.heard_s = now
        took_s, tokens = now - stream.since_s, output_tokens - stream.tokens
        if took_s < SPAN_S or tokens <= 0:
            return None
        # Prompts are computed in their order: of those that are owed, the first alone can have taken time by now.
        prompt_tokens = next(iter(pulse.owed.values())).own_tokens if pulse.owed else 0.0
        prompts_s = (pulse.work_tokens - stream.work_tokens + prompt_tokens) * self._token_s
        stream.since_s, stream.tokens, stream.work_tokens = now, output_tokens, pulse.work_tokens
        if prompts_s > PROMPTS_MOST * took_s or (kv_used or 0.0) > KV_CROWDED:
            # What prompts explain so far is no news, and neither is an engine that computes what it had before.
            pulse.slow = 0
            return None
        steps = tokens * (1.0 + sequences / CROWD)
        ratio = took_s / (steps * self._step_s + prompts_s)
        pulse.best = min(pulse.best, ratio)
        pulse.doubted = pulse.known >= KNOWN and ratio > DOUBTFUL * pulse.rule
        if not pulse.doubted:
            self._step_s = _nearer(self._step_s, (took_s - prompts_s) / steps, GAIN)
        return ratio < self.settings.slow_factor * pulse.rule * self._common

    def finished(self, lease: int) -> None:
        """The lease ended, however it did."""
        stream = self._streams.pop(lease, None)
        if stream is None:
            return
        if stream.pulse.owed.pop(lease, None) is not None:
            stream.pulse.owed_tokens -= stream.own_tokens
            stream.pulse.owed_at_most_tokens -= stream.prompt_tokens

    def forget(self, backend: str) -> None:
        """Another process may come in its place. What is still in flight there ends unseen."""
        self._pulses.pop(backend, None)

    # --- what is made of it --------------------------------------------------------------------------------------

    def look(self, now: float) -> tuple[dict[str, str], dict[str, str]]:
        """The backends that hang, and those that have become slow, each with what tells so in words.

        To be asked whenever something happens: each poll and each first byte is soon enough, and where nothing happens
        at all, nobody is there to compare with.
        """
        if now < self._look_s or len(self._peers.members) < 2:
            return {}, {}
        self._look_s = now + LOOK_S
        silent = {name: self._silent_s(pulse, now) for name, pulse in self._pulses.items() if pulse.owed}
        hung = {
            name: f"hung: silent for {silent_s:.1f} s, first bytes owed: {len(self._pulses[name].owed)}"
            for name, silent_s in silent.items()
            if silent_s is not None
        }
        return hung, self._judge(now) if now >= self._judge_s else {}

    def give_up(self, backend: str) -> Iterator[int]:
        """The leases that have no byte from a backend, of which none is expected any more."""
        pulse = self._pulses[backend]
        owed, pulse.owed = pulse.owed, {}
        pulse.owed_tokens, pulse.owed_at_most_tokens = 0.0, 0
        return iter(owed)

    def _silent_s(self, pulse: _Pulse, now: float) -> float | None:
        """For how long one that hangs has been silent; None where it need not hang."""
        # A stream under way may wait for its client; a first byte waits for nobody.
        since_s = max(pulse.heard_s, next(iter(pulse.owed.values())).booked_s)
        # What is believed to be cached may not be, and a long prompt that is not takes many times as long.
        patience_s = max(self.settings.hung_s, LATE * (BASE_TOKENS + pulse.owed_at_most_tokens) * self._token_s)
        if now < since_s + patience_s:
            return None
        # Where all are silent it is the proxy that stood still, or the way to all of them.
        others_s = max((other.heard_s for other in self._pulses.values() if other is not pulse), default=-inf)
        return now - since_s if others_s >= since_s + 0.5 * patience_s else None

    def _judge(self, now: float) -> dict[str, str]:
        """Close one span of all; answer who was too slow in enough of them, and how slow."""
        self._judge_s = now + SPAN_S
        judged = {name: pulse for name, pulse in self._pulses.items() if pulse.best < inf}
        for pulse in judged.values():
            pulse.slowness, pulse.judged_s, pulse.best = pulse.best / pulse.rule, now, inf
        fresh = {name: pulse.slowness for name, pulse in self._pulses.items() if pulse.judged_s > now - FRESH_S}
        self._common = max(1.0, median(fresh.values())) if fresh else 1.0
        found = {}
        for name, pulse in judged.items():
            if self._peers.members[name].ejected:
                continue
            others = [slowness for other, slowness in fresh.items() if other != name]
            times = pulse.slowness / max(1.0, median(others)) if others else 0.0
            if pulse.known >= KNOWN and times >= self.settings.slow_factor:
                pulse.slow += 1
            else:
                pulse.slow = 0
                pulse.learn_rule()
            if pulse.slow >= IN_A_ROW:
                pulse.slow = 0
                found[name] = f"slow: {times:.1f} times as slow as is its rule"
        return found

    def check(self) -> None:
        """Raise AssertionError when a running sum differs from its recomputation."""
        for pulse in self._pulses.values():
            assert abs(pulse.owed_tokens - sum(stream.own_tokens for stream in pulse.owed.values())) < 1e-3
            assert pulse.owed_at_most_tokens == sum(stream.prompt_tokens for stream in pulse.owed.values())
            assert pulse.owed.keys() <= self._streams.keys()


def _nearer(known: float, seen: float, gain: float) -> float:
    """`known` after one more observation: geometric, and robust, as none counts for more than `STEP_MOST` times."""
    times: float = min(STEP_MOST, max(1.0 / STEP_MOST, seen / known)) ** gain
    return known * times
