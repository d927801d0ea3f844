"""How long silences last while backends load LoRA adapters: vLLM loads inside an engine step, and all streams wait."""

from __future__ import annotations

from math import inf

GUESS_S = 3.0
"""What a load is taken to last before any was seen; the first few that are seen outweigh it."""
LATE = 3.0
"""Times as long as loads last by which one may exceed that."""
MOST_S = 30.0
"""The longest silence that loads explain, however many are under way: beyond it, a frozen backend must be found."""
FADE = 0.02
"""Weight of a load that lasts less than is believed. One that lasts longer is believed at once: adapters differ in size
and in where they come from, and the longest of them must not pass for a hang."""
LEAST = 0.5
"""Times what is believed that one observation counts at least."""
SAME_STEP_S = 0.05
"""How far apart requests come at most that an idle engine begins together, and their first bytes."""


class LoadTime:
    """What a load of an adapter lasts in one pool: follows the longest that were seen, and forgets them by and by."""

    def __init__(self) -> None:
        self.load_s = GUESS_S
        self._seen = 0

    def explained_s(self, loads: int) -> float:
        """The longest silence of a backend that has so many adapters to load."""
        return min(MOST_S, LATE * self.load_s * loads)

    def learn(self, took_s: float, sure: bool) -> None:
        """A load took so long. Where that is not `sure`, it may have been none, or part of one: only more is news."""
        if took_s > self.load_s:
            self.load_s = min(took_s, MOST_S / LATE)
        elif sure:
            self._seen += 1
            self.load_s *= max(LEAST, took_s / self.load_s) ** max(FADE, 1.0 / self._seen)


class Loads:
    """The adapters that one backend may have to load for what it has.

    Of the streams without a byte that wait for one, each is told of until that byte comes. What else may be loaded, for
    a request without a stream or one that was given up, shows no end, and is taken to last until some moment. `done`
    counts those that were `cold`: not believed to be resident.
    """

    def __init__(self, time: LoadTime) -> None:
        self.time = time
        self.done = 0
        self._owed: dict[int, tuple[float, bool]] = {}
        self._until_s = self._heard_s = -inf

    def __len__(self) -> int:
        return len(self._owed)

    def __contains__(self, lease: int) -> bool:
        return lease in self._owed

    def owed(self, lease: int, cold: bool, now: float) -> None:
        """A stream was booked that may need its adapter loaded."""
        self._owed[lease] = now, cold

    def unseen(self, now: float) -> None:
        """A load may begin that no first byte will tell of."""
        self._until_s = min(max(now, self._until_s) + self.time.explained_s(1), now + MOST_S)

    def heard(self, lease: int, silent_since_s: float, prompts_s: float, now: float) -> None:
        """Its first byte came, after a silence of which prompts explain so much."""
        if lease not in self._owed:
            return
        booked_s, cold = self._owed[lease]
        since_s = max(silent_since_s, booked_s)
        # Those that came after the step had begun wait for the next one.
        loads = sum(other_s <= since_s + SAME_STEP_S for other_s, _ in self._owed.values())
        # Others may have waited for a slot meanwhile, and of one step only the first byte ends a silence: that loads
        # last less than is believed is told by those alone that come alone.
        alone = loads == 1 and now >= self._heard_s + SAME_STEP_S
        self.time.learn(max(0.0, now - since_s - prompts_s) / loads, cold and alone)
        self._heard_s = now
        del self._owed[lease]
        self.done += cold

    def ended(self, lease: int, now: float) -> None:
        """It ended without a byte, if it is still owed one: an engine does not stop in the middle of a load."""
        _, cold = self._owed.pop(lease, (now, False))
        if cold:
            self.unseen(now)

    def given_up(self) -> None:
        """No byte is expected any more for what is owed."""
        self._owed.clear()

    def explained_s(self, since_s: float) -> float:
        """How long a silence since then may last for the sake of loads alone."""
        unseen_s = self._until_s - since_s if self._until_s > since_s else 0.0
        return max(self.time.explained_s(len(self._owed)), unseen_s)
