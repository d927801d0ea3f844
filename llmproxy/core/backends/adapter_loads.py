"""How long a silence of a backend may last because it loads LoRA adapters.

vLLM loads an adapter inside an engine step, and all its streams wait meanwhile.
"""

from __future__ import annotations

from math import inf

from llmproxy.core.estimates.learning import follow_ratio, gain

GUESS_S = 3.0
"""Assumed load time before any was seen; the first few observations outweigh it."""
LATE = 3.0
"""A load explains a silence of so many times the longest known load."""
MOST_S = 30.0
"""The longest silence that loads explain, however many are under way. After it a frozen backend must be found."""
FADE = 0.02
"""Weight of a load that took less than the known longest. A longer load counts in full at once: adapters differ in size
and origin, and the slowest of them must not look like a hang."""
LEAST = 0.5
"""An observation counts as at least so many times the known longest."""
SAME_STEP_S = 0.05
"""Requests this close together may begin in one step of an idle engine, and their first bytes come together."""


class LongestLoad:
    """The longest time that a load of an adapter takes in one pool, or another preparation, forgotten slowly.

    `LoadTimesByTier` is another quantity: the mean that a placement expects.
    """

    def __init__(self, guess_s: float = GUESS_S) -> None:
        self.load_s = guess_s
        self._seen = 0

    def explained_s(self, loads: int) -> float:
        """The longest silence of a backend that has so many adapters to load."""
        return min(MOST_S, LATE * self.load_s * loads)

    def learn(self, took_s: float, sure: bool) -> None:
        """A load took `took_s`. If not `sure`, it may have been none or part of one, so only a longer time counts."""
        if took_s > self.load_s:
            self.load_s = min(took_s, MOST_S / LATE)
        elif sure:
            self._seen += 1
            self.load_s = follow_ratio(self.load_s, took_s, gain(FADE, self._seen), LEAST, 1.0)


class PendingLoads:
    """The adapters that one backend may have to load for its requests.

    The load of an unstarted stream is pending until its first byte. A load for a request without a stream, or for one
    that was given up, shows no end and is assumed to last until some time. `done` counts loads of adapters that were
    `cold`: not believed to be resident.
    """

    def __init__(self, longest: LongestLoad) -> None:
        self._longest = longest
        self.done = 0
        self._pending: dict[int, tuple[float, bool]] = {}
        self._unseen_until_s = self._first_byte_s = -inf

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, lease: int) -> bool:
        return lease in self._pending

    def add(self, lease: int, cold: bool, now: float) -> None:
        """A stream was booked whose adapter may have to be loaded."""
        self._pending[lease] = now, cold

    def add_unseen(self, now: float) -> None:
        """A load may begin whose end no first byte will show."""
        until_s = max(now, self._unseen_until_s) + self._longest.explained_s(1)
        self._unseen_until_s = min(until_s, now + MOST_S)

    def first_byte(self, lease: int, silent_since_s: float, prompts_s: float, now: float) -> None:
        """The first byte of `lease` came, after a silence of which prompts explain `prompts_s`."""
        if lease not in self._pending:
            return
        booked_s, cold = self._pending[lease]
        since_s = max(silent_since_s, booked_s)
        # Requests that came after the step had begun wait for the next step.
        loads = sum(other_s <= since_s + SAME_STEP_S for other_s, _ in self._pending.values())
        # Others may have waited for a slot, and only the first byte of a step ends a silence. So only a load on its own
        # can show that loads take less than known.
        alone = loads == 1 and now >= self._first_byte_s + SAME_STEP_S
        self._longest.learn(max(0.0, now - since_s - prompts_s) / loads, cold and alone)
        self._first_byte_s = now
        del self._pending[lease]
        self.done += cold

    def ended(self, lease: int, now: float) -> None:
        """`lease` ended. If it had no byte yet, its load goes on: an engine does not stop in the middle of one."""
        _, cold = self._pending.pop(lease, (now, False))
        if cold:
            self.add_unseen(now)

    def clear(self) -> None:
        """No first byte of the pending loads is expected any more."""
        self._pending.clear()

    def explained_s(self, since_s: float) -> float:
        """How long a silence since `since_s` may last because of loads alone."""
        unseen_s = self._unseen_until_s - since_s if self._unseen_until_s > since_s else 0.0
        return max(self._longest.explained_s(len(self._pending)), unseen_s)
