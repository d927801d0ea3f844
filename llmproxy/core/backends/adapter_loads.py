"""Estimates how long a backend may send nothing while vLLM loads LoRA adapters.

vLLM loads an adapter inside an engine step, so each load pauses all streams of the backend.
"""

from __future__ import annotations

from math import inf

from llmproxy.core.estimates.learning import follow_ratio, gain

GUESS_S = 3.0  # Initial estimate of a load time. A few observations outweigh it.
LATE = 3.0  # A load explains a silence of up to this multiple of the longest known load.
MOST_S = 30.0  # Maximum silence that any number of loads explains, so that a frozen backend is detected.
FADE = 0.02  # Weight of a time below the longest. A longer time counts in full, because adapters differ in size.
LEAST = 0.5  # An observation counts as at least this multiple of the longest known load.
SAME_STEP_S = 0.05  # Requests within this time may start in one engine step, with simultaneous first bytes.


class LongestLoad:
    """Estimates the longest delay of one kind in a pool, such as the load of an adapter.

    A longer delay raises the estimate at once. Shorter delays lower it slowly. Time alone does not change it.
    """

    def __init__(self, guess_s: float = GUESS_S) -> None:
        self.load_s = guess_s
        self._seen = 0

    def explained_s(self, loads: int) -> float:
        """Returns how long a backend may normally be silent while this many loads follow each other, at most MOST_S."""
        return min(MOST_S, LATE * self.load_s * loads)

    def learn(self, took_s: float, sure: bool) -> None:
        """Learns from a load time. If not `sure`, the load may be incomplete, and can only raise `load_s`."""
        if took_s > self.load_s:
            self.load_s = min(took_s, MOST_S / LATE)
        elif sure:
            self._seen += 1
            self.load_s = follow_ratio(self.load_s, took_s, gain(FADE, self._seen), LEAST, 1.0)


class PendingLoads:
    """The adapters that one backend may have to load for its requests.

    The load for a stream is pending until the first byte of the stream. The end of a load for a non-streamed or
    cancelled request is not visible, so this load is assumed to take the longest explained time.
    """

    def __init__(self, longest: LongestLoad) -> None:
        self._longest = longest
        self.done = 0  # Loads of cold adapters (not believed to be resident) that ended, or whose end is not visible.
        self._pending: dict[int, tuple[float, bool]] = {}
        self._unseen_until_s = self._first_byte_s = -inf

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, lease: int) -> bool:
        return lease in self._pending

    def add(self, lease: int, cold: bool, now: float) -> None:
        """Notes a stream whose adapter may have to be loaded. `cold`: the adapter is not believed to be resident."""
        self._pending[lease] = now, cold

    def add_unseen(self, now: float) -> None:
        """Records an adapter load whose end will not be visible, because no first byte follows."""
        until_s = max(now, self._unseen_until_s) + self._longest.explained_s(1)
        self._unseen_until_s = min(until_s, now + MOST_S)

    def first_byte(self, lease: int, silent_since_s: float, prompts_s: float, now: float) -> None:
        """Records the first byte of `lease`. The backend had sent its last byte at `silent_since_s`.

        Prefill explains `prompts_s` seconds of the silence. A lease without a pending load is ignored.
        """
        if lease not in self._pending:
            return
        booked_s, cold = self._pending[lease]
        since_s = max(silent_since_s, booked_s)
        # Requests that arrived after the start of the step wait for the next step.
        loads = sum(other_s <= since_s + SAME_STEP_S for other_s, _ in self._pending.values())
        # Other requests may have waited for a slot, and only the first byte of a step ends a silence. So only a single
        # load can show that loads take less time.
        alone = loads == 1 and now >= self._first_byte_s + SAME_STEP_S
        self._longest.learn(max(0.0, now - since_s - prompts_s) / loads, cold and alone)
        self._first_byte_s = now
        del self._pending[lease]
        self.done += cold

    def ended(self, lease: int, now: float) -> None:
        """Records the end of `lease`. A load without a first byte goes on, because engines do not abort loads."""
        _, cold = self._pending.pop(lease, (now, False))
        if cold:
            self.add_unseen(now)

    def clear(self) -> None:
        self._pending.clear()

    def explained_s(self, since_s: float) -> float:
        """Returns how long a silence that began at `since_s` may last because of adapter loads alone."""
        unseen_s = self._unseen_until_s - since_s if self._unseen_until_s > since_s else 0.0
        return max(self._longest.explained_s(len(self._pending)), unseen_s)
