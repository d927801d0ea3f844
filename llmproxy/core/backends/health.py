"""May this backend be given work? Decided from polls (active) and from what requests met (passive)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmproxy.core.domain import Trouble, Verdict
from llmproxy.core.settings import HealthSettings

BUSY_PAUSE_S = 0.25
"""How long an engine that answered 503 'busy' is left alone: about one poll, after which its queue is known."""
WARM_STEP = 0.1
"""By how much of its limit a backend that came back is given more at a time, and how much it has at once."""


@dataclass(frozen=True, slots=True)
class Ejected:
    """Nothing is sent there for `pause_s` seconds, and then one request that is to find out."""

    why: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class Back:
    """What spoke against it is refuted, `after_s` seconds since it was first ejected for it."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Spared:
    """Enough speaks against it, but its pool cannot spare one more (`ejected_max`)."""

    why: str


News = Ejected | Back | Spared
"""What a person should know of the health of a backend."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A backend that hangs: since when it is silent, how many first bytes it owes, and how many streams under way have
    stopped at once, where that is what told it.
    """

    since_s: float
    owed: int
    stopped: int

    def told(self, now: float) -> str:
        stopped = f", streams that stopped together: {self.stopped}" if self.stopped else ""
        return f"hung: silent for {now - self.since_s:.1f} s, first bytes owed: {self.owed}{stopped}"


class Peers:
    """The backends of one pool, of which what requests met may eject no more than a share.

    Envoy's `max_ejection_percent`: when most of a pool fails, the fault is more likely in what all of them are sent, or
    on the way, and a doubtful backend is better than none.
    """

    def __init__(self, ejected_max: float) -> None:
        self.ejected_max = ejected_max
        self.members: dict[str, Health] = {}

    def may_eject(self) -> bool:
        """Whether one more may be ejected. Those that polls say are down count as neither ejected nor left.

        Counted when somebody is about to be ejected, which is rare, and not kept for every decision.
        """
        up = [health for health in self.members.values() if not health.down]
        return sum(health.ejected for health in up) < max(1, int(self.ejected_max * len(up)))

    def others_than(self, health: Health) -> bool:
        """Whether anybody else is up who could take the work of this one."""
        return any(not (other is health or other.down or other.ejected) for other in self.members.values())


class Health:
    """Two separate bits: *down* is what polls say, *ejected* is what requests say.

    An ejection ends by itself, half open: one request is let through, and its first byte (or a fresh start seen by the
    poller) closes the case. A 4xx never reaches this class, and a busy 503 is a pause, unless it comes from an engine
    that has nothing to do while others are up: that is a failure as any other. Whoever comes back, or comes up for the
    first time, starts slowly: see `warmth`.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self.peers: Peers | None = None
        self.tell: Callable[[News], None] = lambda _: None
        """Is told of every ejection and of its end, and of those that should have been, if not each time."""
        self.down = True
        self._troubles = 0
        self._refusals = 0
        self._failures = 0
        self._ejections = 0
        self.ejected_times = 0
        self.slow = False
        self._spared_until_s = 0.0
        self.stream_probe = False
        """Only a stream can tell whether it is well again: it hung, or is slow."""
        self._half_open = False
        self._probe: int | None = None
        self._blocked_until_s = 0.0
        self._first_ejected_s = 0.0
        self._back_s: float | None = None

    @property
    def gone(self) -> bool:
        """There is no process: connections are refused, again and again."""
        return self._refusals >= self._settings.unreachable_after

    @property
    def ejected(self) -> bool:
        """Requests met something that speaks against it, and none has yet met the contrary."""
        return self._half_open

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

    def warmth(self, now: float) -> float:
        """How much of its work it should have again since it came back (0..1], in steps of `WARM_STEP`.

        Its caches are cold, and whoever looks for the least load would send it everything that comes.
        """
        if self._back_s is None:
            return 1.0
        slow_start_s = self._settings.slow_start_s
        share = (now - self._back_s) / slow_start_s if slow_start_s else 1.0
        if share >= 1.0:
            self._back_s = None
            return 1.0
        return max(1, int(share / WARM_STEP)) * WARM_STEP

    def warmer_at(self, now: float) -> float | None:
        """When `warmth` is next another; None where it stays."""
        if self._back_s is None:
            return None
        warmth = self.warmth(now)
        # A hair behind the edge, where rounding cannot make it the same step again.
        step_s = self._settings.slow_start_s * (warmth + WARM_STEP) * (1.0 + 1e-9)
        return None if self._back_s is None else self._back_s + step_s

    # --- polls ---------------------------------------------------------------------------------------------------

    def answered(self, now: float) -> None:
        """A poll was answered in good health; a backend that was down starts with a clean record, and slowly."""
        if self.down:
            self._back_s = now
            self._acquit(now)
            self._failures = 0
            self._blocked_until_s = 0.0
        self.down = False
        self._troubles = self._refusals = 0

    def troubled(self, trouble: Trouble) -> bool:
        """A poll failed. True when this proves that the process is gone, so that its open streams are dead too.

        Only refused connections prove that: a server that is shutting down or was replaced refuses at once, whereas a
        slow answer may just be a long step. Unreadable metrics are no evidence at all, and no more is what keeps this
        machine from asking.
        """
        if trouble in (Trouble.GARBAGE, Trouble.LOCAL_FAILURE):
            return False
        self._troubles += 1
        self._refusals = self._refusals + 1 if trouble is Trouble.REFUSED else 0
        after = self._settings.unreachable_after
        if trouble is Trouble.UNHEALTHY or self._troubles >= after:
            self.down = True
        return self.gone

    # --- requests --------------------------------------------------------------------------------------------------

    def booked(self, lease: int) -> None:
        if self._half_open:
            self._probe = lease

    def spoke(self, lease: int, now: float) -> None:
        """The backend sent a first byte for this lease: whatever it was suspected of, it serves.

        Only of one that has become `slow` a byte says little.
        """
        self._failures = 0
        if lease == self._probe and not self.slow:
            self._close_case(now)

    def paced(self, lease: int, fast: bool, now: float) -> None:
        """A stream of one that was found slow says how fast it is by now.

        One from before the ejection ends the pause. It closes no case: who is well again is to be given work, and a
        placement that has learned how slow it was gives it none but the probe.
        """
        if not fast:
            self._eject("slow: its probe was as slow", now)
        elif lease == self._probe:
            self._close_case(now)
        elif self._half_open:
            self._blocked_until_s = min(self._blocked_until_s, now)

    def finished(self, lease: int, verdict: Verdict, now: float, *, idle: bool = False) -> None:
        """The lease ended; the backend is `idle` if nothing else is known to be running there."""
        was_probe = lease == self._probe
        if was_probe:
            self._probe = None
        match verdict:
            case Verdict.SERVED:
                self._failures = 0
                if was_probe:
                    self._close_case(now)
            case Verdict.CONNECT_FAILED | Verdict.DRAINING:
                # No opinion but a fact, and whoever were sent there meanwhile would fail: the share does not limit it.
                why = "no connection" if verdict is Verdict.CONNECT_FAILED else "it is shutting down"
                self._eject(why, now)
            case Verdict.FAILED:
                self._failed(was_probe, now)
            case Verdict.BUSY:
                # Where nobody else would take its work, an ejection helps nobody, and outlasts what was the matter.
                if idle and (self.peers is None or self.peers.others_than(self)):
                    self._failed(was_probe, now)
                self._blocked_until_s = max(self._blocked_until_s, now + BUSY_PAUSE_S)
            case Verdict.CLIENT_GONE | Verdict.LOST | Verdict.PREEMPTED | Verdict.LOCAL_FAILURE:
                pass

    def _failed(self, was_probe: bool, now: float) -> None:
        self._failures += 1
        if was_probe:
            self.suspect("its probe failed", now)
        elif self._failures >= self._settings.failures:
            self.suspect(f"{self._failures} failures in a row", now)

    def hangs(self, why: str, now: float) -> bool:
        """It brings nothing: eject it, if its pool can spare one more; whether that is so."""
        if not self.suspect(why, now):
            return False
        self.stream_probe = True
        return True

    def slowed(self, why: str, now: float) -> bool:
        """It has become slow: eject it, if its pool can spare one more; whether that is so."""
        if not self.suspect(why, now):
            return False
        self.slow = self.stream_probe = True
        return True

    def suspect(self, why: str, now: float) -> bool:
        """Eject it, if its pool can spare one more; whether that is so."""
        if not self._half_open and self.peers is not None and not self.peers.may_eject():
            self._spare(why, now)
            return False
        self._eject(why, now)
        return True

    def _spare(self, why: str, now: float) -> None:
        """Tell of the first time only, as long as there is no pause in which an ejection would have ended."""
        if now >= self._spared_until_s:
            self.tell(Spared(why))
        self._spared_until_s = now + self._settings.backoff_max_s

    def _close_case(self, now: float) -> None:
        self._acquit(now)
        self._back_s = now

    def _acquit(self, now: float) -> None:
        if self._half_open:
            self.tell(Back(now - self._first_ejected_s))
        self._half_open, self._probe, self._ejections = False, None, 0
        self.slow = self.stream_probe = False

    def _eject(self, why: str, now: float) -> None:
        # Many requests may fail from one cause in one instant; they are one ejection, not one each.
        if self._half_open and now < self._blocked_until_s:
            return
        pause_s = min(self._settings.backoff_max_s, self._settings.backoff_s * 2.0 ** min(self._ejections, 16))
        if not self._half_open:
            self._first_ejected_s = now
        self._ejections += 1
        self.ejected_times += 1
        self._failures = 0
        self._half_open, self._probe = True, None
        self._blocked_until_s = max(self._blocked_until_s, now + pause_s)
        self.tell(Ejected(why, pause_s))
