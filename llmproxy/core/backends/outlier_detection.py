"""Which backends of a pool hang, and which have become slow: judged by what their streams bring, beside the others'.

A worker that is frozen, or a GPU that is throttled, answers polls as ever. What it owes its streams tells: it is held
against what was predicted, its own past and the rest of its pool, whichever placement chose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from statistics import median

from llmproxy.core.backends.adapter_loads import Loads, LoadTime
from llmproxy.core.backends.health import Peers, Silent
from llmproxy.core.domain import Placed, Request
from llmproxy.core.settings import HealthSettings

LOOK_S = 0.25
"""How often the pool is looked over at most."""
SPAN_S = 0.5
"""How long a stream is followed for one observation of its speed, and a backend for one judgement."""
LATE = 5.0
"""Times the predicted time to all first bytes that it owes, after which a silent backend counts as hung."""
TOGETHER = 3
"""Streams under way that fall silent at once are no matter of their clients any more if they are as many."""
TOGETHER_S = 0.6
"""What is at once: longer than two pieces of news of a stream that flows lie apart."""
TOGETHER_LATE = 2.0
"""As `LATE`, where streams under way have stopped together: most engines go on with them while they compute prompts."""
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
SLOW_S = 2.0
"""Seconds of slowness that it takes: less may be a collection of garbage, a compilation, a burst of long prompts."""
SLOW_WITHIN_S = 6.0
"""How soon after each other these come, beside spans that say nothing."""
PROMPT_LATE = 2.0
"""Times the predicted time of a prompt of which nothing is cached that it may explain."""
PROMPTS_MOST = 0.3
"""Share of a span that prompts may explain where it teaches how fast a backend is: how long they take is a guess."""
KV_CROWDED = 0.9
"""Use of a KV-cache from which on an engine may take sequences out of its batch and compute them again."""
FRESH_S = 5.0
"""How long a judgement of another backend is one to compare with."""


@dataclass(slots=True)
class _Pulse:
    """One backend. `owed` are streams without a byte, the oldest first, `owed_tokens` what is to be computed of their
    prompts, and `owed_at_most_tokens` what is if nothing of them is cached; `loads` are the adapters that may have to
    be loaded for them; `under_way` are those with a byte, and `heard_s` is when any stream last brought something.

    `work_tokens` counts the prompt tokens that it has computed so far, `prompts_s` the time that these may have taken
    until `turn_s`, when it last owed none, brought a first byte or was fast. `best` is the speed of its fastest stream
    since `looked_s`, in times of what is the pool's: one slow reader, or one odd stream, is no news of an engine. That
    is where prompts took as long as is believed; `least` is what is left of it where they took as long as they may,
    which leaves `unexplained_s`, and `most` where they took no time. `rule` is what `best` is as a rule, over `known`
    judgements; `slowness`, as of `judged_s`, what the last was of it, and `slow_s` for how long it was too slow since
    `slow_since_s`. It is `doubted` while its last observation was far off.
    """

    loads: Loads
    owed: dict[int, _Stream] = field(default_factory=dict)
    owed_tokens: float = 0.0
    owed_at_most_tokens: int = 0
    under_way: dict[int, _Stream] = field(default_factory=dict)
    heard_s: float = -inf
    work_tokens: float = 0.0
    prompts_s: float = 0.0
    turn_s: float = -inf
    best: float = inf
    least: float = inf
    most: float = inf
    rule: float = 1.0
    known: int = 0
    slowness: float = 1.0
    judged_s: float = -inf
    unexplained_s: float = 0.0
    looked_s: float = -inf
    slow_s: float = 0.0
    slow_since_s: float = -inf
    doubted: bool = False

    def slower(self, now: float) -> None:
        """It was too slow since the last judgement."""
        if not self.slow_s or now > self.slow_since_s + SLOW_WITHIN_S:
            self.slow_s, self.slow_since_s = 0.0, now
        self.slow_s += min(self.unexplained_s, now - self.looked_s)

    def learn_rule(self) -> None:
        """The last judgement is one more of how fast it is as a rule."""
        self.known += 1
        self.rule = _nearer(self.rule, self.rule * self.slowness, max(RULE_GAIN, 1.0 / self.known))


@dataclass(slots=True)
class _Stream:
    """A lease, with a prompt of `prompt_tokens`. `ahead_tokens` had to be computed for its first byte when it was
    booked, `own_tokens` of them its own; its `adapter` may have been `cold`, and `ahead_loads` are those that may have
    been loaded before its first byte.

    Since `since_s`, when its backend had computed `work_tokens` and loaded `loaded` adapters in `prompts_s` at most, it
    brought all beyond its first `tokens`; `heard_s` is when it last brought any.
    """

    pulse: _Pulse
    booked_s: float
    prompt_tokens: int
    own_tokens: float
    ahead_tokens: float
    since_s: float
    adapter: str | None
    cold: bool
    ahead_loads: int = 0
    tokens: int = 0
    work_tokens: float = 0.0
    loaded: int = 0
    prompts_s: float = 0.0
    heard_s: float = -inf

    def begin(self, tokens: int, prompts_s: float, now: float) -> None:
        """Begin a span, at so many tokens of the answer."""
        self.since_s, self.tokens = now, tokens
        self.work_tokens, self.loaded, self.prompts_s = self.pulse.work_tokens, self.pulse.loads.done, prompts_s


class OutlierDetection:
    """Follows the streams of one pool; changes nothing of it.

    **Hung** is a backend that owes first bytes and has been silent for `hung_s`, or `LATE` times as long as all that it
    owes was predicted to take, where others of its pool spoke meanwhile. So is one of which `TOGETHER` streams that
    flowed have stopped at once. Fewer streams under way prove nothing: it may be the client who does not read. Long
    prompts explain long silence, and so do adapters that have to be loaded. Of one that is ejected, what it owes is its
    probe: that need not wait for others to speak, as the burden of proof is the backend's by then.

    **Slow** is one whose fastest stream takes `slow_factor` times as long as is its rule, beside the median of the
    others by the same measure, for `SLOW_S` in all. A pool that slows down as a whole has no outlier, and one that was
    slow from its beginning is another kind of machine, which is for the placement to know. Time that prompts may
    explain, if nothing of them was cached, does not count; a span that is slow with that time, and not without it,
    says nothing. (Grey failure: Huang et al., "Gray Failure: The Achilles' Heel of Cloud-Scale Systems", HotOS 2017.)

    What is predicted are the pool's own times: seconds to a first byte over the prompt tokens ahead of it, and seconds
    for each token of a stream.
    """

    def __init__(self, settings: HealthSettings, peers: Peers) -> None:
        self.settings = settings
        self._peers = peers
        self._pulses: dict[str, _Pulse] = {}
        self._streams: dict[int, _Stream] = {}
        self._load_time = LoadTime()
        self._token_s = 1 / 15_000
        self._step_s = 0.01
        self._common = 1.0
        self._due_s = inf
        self._look_s = -inf
        self._judge_s = -inf

    # --- what leases bring ---------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, cold: bool, now: float) -> None:
        """`cold`: it has an adapter that is not believed to be resident there."""
        pulse = self._pulses.get(placed.backend)
        if pulse is None:
            pulse = self._pulses[placed.backend] = _Pulse(Loads(self._load_time))
        # A placement may believe more tokens to be cached than the prompt is estimated to have.
        own_tokens = max(0.0, float(request.prompt_tokens - placed.cached_tokens))
        if not request.stream:
            # Nobody sees its first token; that its prompt takes time is all it tells.
            pulse.work_tokens += own_tokens
            pulse.prompts_s += request.prompt_tokens * self._token_s
            if cold:
                pulse.prompts_s += self._load_time.explained_s(1)
                pulse.loads.unseen(now)
                pulse.loads.done += 1
            return
        self._due_s = min(self._due_s, now + self.settings.hung_s)
        pulse.owed_tokens += own_tokens
        pulse.owed_at_most_tokens += request.prompt_tokens
        if not pulse.owed:
            pulse.turn_s = now
        adapter = request.adapter
        stream = _Stream(pulse, now, request.prompt_tokens, own_tokens, pulse.owed_tokens, now, adapter, cold)
        self._streams[lease] = pulse.owed[lease] = stream
        # Which adapters are resident is known by and large: a stream that flows proves it.
        if adapter is not None and (cold or _unused(adapter, pulse)):
            pulse.loads.owed(lease, cold, now)
        stream.ahead_loads = len(pulse.loads)

    def committed(self, lease: int, now: float) -> None:
        """A byte went to the client: it cannot be sent elsewhere any more."""
        if lease in self._streams:
            self._speaks(lease, self._streams[lease], now)

    def started(self, lease: int, now: float) -> None:
        """The first token came."""
        stream = self._streams.get(lease)
        if stream is None:
            return
        if not (stream.pulse.doubted or stream.ahead_loads or stream.pulse.loads):
            self._token_s = _nearer(self._token_s, (now - stream.booked_s) / (BASE_TOKENS + stream.ahead_tokens), GAIN)
        self._speaks(lease, stream, now)
        stream.begin(1, self._prompts_s(stream.pulse, now), now)

    def _speaks(self, lease: int, stream: _Stream, now: float) -> None:
        pulse = stream.pulse
        since_s, prompts_s = pulse.heard_s, (BASE_TOKENS + pulse.owed_tokens) * self._token_s
        pulse.heard_s = stream.heard_s = now
        pulse.under_way[lease] = stream
        if self._owes_no_more(lease, stream, now):
            pulse.work_tokens += stream.own_tokens
            pulse.loads.heard(lease, since_s, prompts_s, now)

    def _owes_no_more(self, lease: int, stream: _Stream, now: float) -> bool:
        """Strike a first byte off what is owed; whether it was among that."""
        pulse = stream.pulse
        if lease not in pulse.owed:
            return False
        pulse.prompts_s, pulse.turn_s = self._prompts_s(pulse, now), now
        del pulse.owed[lease]
        pulse.owed_tokens -= stream.own_tokens
        pulse.owed_at_most_tokens -= stream.prompt_tokens
        return True

    def _prompts_s(self, pulse: _Pulse, now: float) -> float:
        """Seconds that prompts may have taken of a backend so far."""
        if not pulse.owed:
            return pulse.prompts_s
        # What is believed to be cached may not be, and any of them may be the one that is computed.
        at_most_s = PROMPT_LATE * max(stream.prompt_tokens for stream in pulse.owed.values()) * self._token_s
        return pulse.prompts_s + min(now - pulse.turn_s, at_most_s + pulse.loads.explained_s(pulse.turn_s))

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
        pulse.heard_s = stream.heard_s = now
        took_s, tokens = now - stream.since_s, output_tokens - stream.tokens
        if took_s < SPAN_S or tokens <= 0:
            return None
        # Of what is owed, the first alone can have taken time by now.
        first = next(iter(pulse.owed.values()), None)
        owed_tokens, loading = (first.own_tokens, first.cold) if first is not None else (0.0, False)
        prompts_s = (pulse.work_tokens - stream.work_tokens + owed_tokens) * self._token_s
        prompts_s += (pulse.loads.done - stream.loaded + loading) * self._load_time.load_s
        so_far_s = self._prompts_s(pulse, now)
        unexplained_s = max(0.0, took_s - (so_far_s - stream.prompts_s))
        stream.begin(output_tokens, so_far_s, now)
        if (kv_used or 0.0) > KV_CROWDED:
            # An engine that computes again what it had before is no news.
            pulse.slow_s = 0.0
            return None
        steps = tokens * (1.0 + sequences / CROWD)
        least, most = unexplained_s / (steps * self._step_s), took_s / (steps * self._step_s)
        if least < pulse.least:
            pulse.least, pulse.unexplained_s = least, unexplained_s
        pulse.most = min(pulse.most, most)
        bound = self.settings.slow_factor * pulse.rule * self._common
        fast = None if least < bound <= most else most < bound
        if fast:
            # No prompt was computed: what is owed waits for room, and its time is still to come.
            pulse.prompts_s, pulse.turn_s = so_far_s, now
        if prompts_s > PROMPTS_MOST * took_s:
            return fast
        ratio = took_s / (steps * self._step_s + prompts_s)
        pulse.best = min(pulse.best, ratio)
        pulse.doubted = pulse.known >= KNOWN and ratio > DOUBTFUL * pulse.rule
        if not pulse.doubted:
            self._step_s = _nearer(self._step_s, (took_s - prompts_s) / steps, GAIN)
        return fast

    def finished(self, lease: int, now: float) -> None:
        """The lease ended, however it did."""
        stream = self._streams.pop(lease, None)
        if stream is None:
            return
        stream.pulse.under_way.pop(lease, None)
        self._owes_no_more(lease, stream, now)
        stream.pulse.loads.ended(lease, now)
        if stream.adapter is not None and _unused(stream.adapter, stream.pulse):
            # What waits for it since may find it gone.
            for other, one in stream.pulse.owed.items():
                if one.adapter == stream.adapter and other not in stream.pulse.loads:
                    stream.pulse.loads.owed(other, one.cold, now)

    def forget(self, backend: str) -> None:
        """Another process may come in its place. What is still in flight there ends unseen."""
        self._pulses.pop(backend, None)

    # --- what is made of it --------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float | None:
        """When somebody may have been silent for too long although nothing happens; None where only an event tells."""
        known = self._due_s < inf and len(self._peers.members) > 1
        return max(self._due_s, self._look_s) if known else None

    def look(self, now: float) -> tuple[dict[str, Silent], dict[str, str]]:
        """The backends that hang, and those that have become slow, each with what tells so.

        To be asked whenever something happens, and at `due_s`.
        """
        if now < self._look_s:
            return {}, {}
        self._look_s, self._due_s = now + LOOK_S, inf
        if len(self._peers.members) < 2:
            return {}, {}
        hung = {}
        for name, pulse in self._pulses.items():
            if (told := self._silence(name, pulse, now)) is not None:
                hung[name] = told
        return hung, self._judge(now) if now >= self._judge_s else {}

    def give_up(self, backend: str) -> Iterator[int]:
        """The leases that have no byte from a backend, of which none is expected any more."""
        pulse = self._pulses[backend]
        owed, pulse.owed = pulse.owed, {}
        pulse.loads.given_up()
        pulse.owed_tokens, pulse.owed_at_most_tokens = 0.0, 0
        return iter(owed)

    def _silence(self, name: str, pulse: _Pulse, now: float) -> Silent | None:
        """The silence of one that hangs; None where it need not hang."""
        ejected = self._peers.members[name].ejected
        # What is believed to be cached may not be, and a long prompt that is not takes many times as long.
        owed_s = (BASE_TOKENS + pulse.owed_at_most_tokens) * self._token_s
        if pulse.owed:
            # A stream under way may wait for its client; a first byte waits for nobody.
            since_s = max(pulse.heard_s, next(iter(pulse.owed.values())).booked_s)
            if self._alone_silent(pulse, since_s, LATE * owed_s, now, ejected):
                return Silent(since_s, len(pulse.owed), 0)
        if not ejected and len(pulse.under_way) >= TOGETHER:
            since_s = pulse.heard_s
            if self._alone_silent(pulse, since_s, TOGETHER_LATE * owed_s, now, ejected):
                stopped = sum(stream.heard_s >= since_s - TOGETHER_S for stream in pulse.under_way.values())
                if stopped >= TOGETHER:
                    return Silent(since_s, len(pulse.owed), stopped)
        return None

    def _alone_silent(self, pulse: _Pulse, since_s: float, late_s: float, now: float, ejected: bool) -> bool:
        """Whether one has been silent for too long since then, and it alone."""
        patience_s = max(self.settings.hung_s, late_s) + pulse.loads.explained_s(since_s)
        if now < since_s + patience_s:
            self._due_s = min(self._due_s, since_s + patience_s)
            return False
        if ejected:
            return any(not health.down and not health.ejected for health in self._peers.members.values())
        # Where all are silent it is the proxy that stood still, or the way to all of them.
        others_s = max((other.heard_s for other in self._pulses.values() if other is not pulse), default=-inf)
        return others_s >= since_s + 0.5 * patience_s

    def _judge(self, now: float) -> dict[str, str]:
        """Close one span of all; answer who was too slow in enough of them, and how slow."""
        self._judge_s = now + SPAN_S
        for pulse in self._pulses.values():
            if pulse.best < inf:
                pulse.slowness, pulse.judged_s = pulse.best / pulse.rule, now
        fresh = {name: pulse.slowness for name, pulse in self._pulses.items() if pulse.judged_s > now - FRESH_S}
        self._common = max(1.0, median(fresh.values())) if fresh else 1.0
        found = {}
        for name, pulse in self._pulses.items():
            if pulse.most == inf:
                continue
            others = [slowness for other, slowness in fresh.items() if other != name]
            bound = self.settings.slow_factor * pulse.rule * max(1.0, median(others)) if others else inf
            ejected, least = self._peers.members[name].ejected, pulse.least
            if not ejected and (pulse.known < KNOWN or pulse.most < bound):
                pulse.slow_s = 0.0
                if pulse.best < inf:
                    pulse.learn_rule()
            elif not ejected and least >= bound:
                pulse.slower(now)
            pulse.best = pulse.least = pulse.most = inf
            pulse.looked_s = now
            if pulse.slow_s >= SLOW_S:
                pulse.slow_s = 0.0
                found[name] = f"slow: {least * self.settings.slow_factor / bound:.1f} times as slow as is its rule"
        return found

    def check(self) -> None:
        """Raise AssertionError when a running sum differs from its recomputation."""
        for pulse in self._pulses.values():
            assert abs(pulse.owed_tokens - sum(stream.own_tokens for stream in pulse.owed.values())) < 1e-3
            assert pulse.owed_at_most_tokens == sum(stream.prompt_tokens for stream in pulse.owed.values())
            assert pulse.owed.keys() | pulse.under_way.keys() <= self._streams.keys()


def _unused(adapter: str, pulse: _Pulse) -> bool:
    """Whether no stream under way uses an adapter."""
    return all(one.adapter != adapter for one in pulse.under_way.values())


def _nearer(known: float, seen: float, gain: float) -> float:
    """`known` after one more observation: geometric, and robust, as none counts for more than `STEP_MOST` times."""
    times: float = min(STEP_MOST, max(1.0 / STEP_MOST, seen / known)) ** gain
    return known * times
