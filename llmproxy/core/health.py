"""May this backend be given work? Decided from polls (active) and from what requests met (passive)."""

from __future__ import annotations

from llmproxy.core.domain import Trouble, Verdict
from llmproxy.core.settings import HealthSettings

BUSY_PAUSE_S = 0.25
"""How long an engine that answered 503 'busy' is left alone: about one poll, after which its queue is known."""


class Health:
    """Two separate bits: *down* is what polls say, *ejected* is what requests say.

    An ejection ends by itself, half open: one request is let through, and its first byte (or a fresh start seen by the
    poller) closes the case. A 4xx never reaches this class, and a busy 503 is a pause, not a failure.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self.down = True
        self._troubles = 0
        self._refusals = 0
        self._failures = 0
        self._ejections = 0
        self._half_open = False
        self._probe: int | None = None
        self._blocked_until_s = 0.0

    def available(self, now: float) -> bool:
        return not self.down and now >= self._blocked_until_s and self._probe is None

    def changes_at(self, now: float) -> float | None:
        """When availability changes by the passing of time alone; None when only an event can change it."""
        return self._blocked_until_s if not self.down and now < self._blocked_until_s else None

    def reconfigure(self, settings: HealthSettings) -> None:
        """Judge by other settings from now on."""
        self._settings = settings

    def replaced(self) -> None:
        """Another process is behind the name: it is down until a poll finds it, and then begins with a clean record."""
        self.down = True

    # --- polls ---------------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """A poll was answered in good health; a backend that was down starts with a clean record."""
        if self.down:
            self._failures = self._ejections = 0
            self._half_open, self._probe = False, None
            self._blocked_until_s = 0.0
        self.down = False
        self._troubles = self._refusals = 0

    def troubled(self, trouble: Trouble) -> bool:
        """A poll failed. True when this proves that the process is gone, so that its open streams are dead too.

        Only refused connections prove that: a server that is shutting down or was replaced refuses at once, whereas a
        slow answer may just be a long step. Unreadable metrics are no evidence at all.
        """
        if trouble is Trouble.GARBAGE:
            return False
        self._troubles += 1
        self._refusals = self._refusals + 1 if trouble is Trouble.REFUSED else 0
        after = self._settings.unreachable_after
        if trouble is Trouble.UNHEALTHY or self._troubles >= after:
            self.down = True
        return self._refusals >= after

    # --- requests --------------------------------------------------------------------------------------------------

    def booked(self, lease: int) -> None:
        if self._half_open:
            self._probe = lease

    def spoke(self, lease: int) -> None:
        """The backend sent a first byte for this lease: whatever it was suspected of, it serves."""
        self._failures = 0
        if lease == self._probe:
            self._close_case()

    def finished(self, lease: int, verdict: Verdict, now: float) -> None:
        was_probe = lease == self._probe
        if was_probe:
            self._probe = None
        match verdict:
            case Verdict.SERVED:
                self._failures = 0
                if was_probe:
                    self._close_case()
            case Verdict.CONNECT_FAILED | Verdict.DRAINING:
                self._eject(now)
            case Verdict.FAILED:
                self._failures += 1
                if self._failures >= self._settings.failures or was_probe:
                    self._eject(now)
            case Verdict.BUSY:
                self._blocked_until_s = max(self._blocked_until_s, now + BUSY_PAUSE_S)
            case Verdict.CLIENT_GONE | Verdict.LOST | Verdict.WITHDRAWN:
                pass

    def _close_case(self) -> None:
        self._half_open, self._probe, self._ejections = False, None, 0

    def _eject(self, now: float) -> None:
        # Many requests may fail from one cause in one instant; they are one ejection, not one each.
        if self._half_open and now < self._blocked_until_s:
            return
        pause_s = min(self._settings.backoff_max_s, self._settings.backoff_s * 2.0 ** min(self._ejections, 16))
        self._ejections += 1
        self._failures = 0
        self._half_open = True
        self._blocked_until_s = max(self._blocked_until_s, now + pause_s)
