"""The health of a backend, from polls (active health checks) and requests (passive health checks)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from llmproxy.core.backends.failure_rate import FailureRate
from llmproxy.core.domain import Trouble, Verdict
from llmproxy.core.settings import HealthSettings

BUSY_PAUSE_S = 0.25  # Pause after a 503 "busy": about one poll interval, after which the engine's queue is known.
CHEAP_DOUBLINGS = 2  # Maximum number of doublings of a pause, if a failed probe costs less than a longer pause.
REFUSED_PAUSE_S = 1.0  # Pause after a refused key or model, in which another backend may serve the request.
WARM_STEP = 0.1  # First share of its limit that a backend gets during slow start, and the increment of each step.


FACTS = {
    Verdict.CONNECT_FAILED: "no connection",
    Verdict.DRAINING: "it is shutting down",
    Verdict.ENGINE_DEAD: "its engine died",
}
REFUSALS = {
    Verdict.UNAUTHORIZED: "it refuses the key that the proxy sends",
    Verdict.NOT_SERVED: "it does not serve a model that it lists",
}


@dataclass(frozen=True, slots=True)
class Ejected:
    """Event: the backend gets no requests for `pause_s` seconds, and none before it answers polls again.

    Then a single request probes it. The pause may be shortened. A backend that was down meanwhile needs no probe.
    """

    why: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class Unejected:
    """Event: an ejection ended, `after_s` seconds after its start."""

    after_s: float


@dataclass(frozen=True, slots=True)
class EjectionSkipped:
    """Event: a backend was not ejected: too many of its pool are ejected, or no other backend serves its requests."""

    why: str


EjectionEvent = Ejected | Unejected | EjectionSkipped


@dataclass(frozen=True, slots=True)
class Hang:
    """Evidence that a backend hangs."""

    since_s: float  # Start of the silence.
    owed: int  # Requests that wait for a first byte; if `proved`, all requests in flight.
    stopped: int  # Streams that stopped together, if that is the evidence.
    idle: bool = False  # Whether the gauges show none of the requests that were sent to the engine.
    unanswered: bool = False  # Whether the backend does not answer polls either.
    frozen: bool = False  # Whether scrapes show requests, and the counter of generated tokens does not increase.

    @property
    def proved(self) -> bool:
        """Whether the backend itself shows that it works on nothing. Silent streams alone may be a long prefill."""
        return self.unanswered or self.frozen

    def why(self, now: float) -> str:
        if self.idle:
            return f"hung: its engine has shown none of {self.owed} requests for {now - self.since_s:.1f} s"
        if self.proved:
            sign = "no poll answered" if self.unanswered else "no token generated"
            return f"hung: silent for {now - self.since_s:.1f} s, {sign}, answers owed: {self.owed}"
        stopped = f", streams that stopped together: {self.stopped}" if self.stopped else ""
        return f"hung: silent for {now - self.since_s:.1f} s, first bytes owed: {self.owed}{stopped}"


class Peers:
    """The backends of one pool, and the largest share of them that may be ejected (Envoy's `max_ejection_percent`).

    If most of a pool fails, the cause is more likely in the requests or in the network, and a doubtful backend is
    better than none.
    """

    def __init__(self, ejected_ratio_max: float) -> None:
        self.ejected_ratio_max = ejected_ratio_max
        self.members: dict[str, Health] = {}

    def may_eject(self, one: Health) -> bool:
        """Returns whether `one` may be ejected: not too many backends are ejected, and others can take its requests."""
        up = [health for health in self.members.values() if not (health.down or health.drained)]
        spared = sum(health.ejected for health in up) < max(1, int(self.ejected_ratio_max * len(up)))
        return spared and self.others_up(one)

    def others_up(self, than: Health) -> bool:
        """Returns whether other backends accept requests for each model of `than`."""
        others = [other for other in self.members.values() if other is not than]
        others = [other for other in others if not (other.down or other.drained or other.ejected)]
        return bool(others) and all(any(model in other.models for other in others) for model in than.models)

    def others_answered(self, than: Health, since_s: float) -> bool:
        """Returns whether another backend has answered a poll since `since_s`, which shows that the network works."""
        return any(other.answered_s >= since_s for other in self.members.values() if other is not than)


class Health:
    """The health of one backend: polls mark it *down*, requests eject it.

    After the pause of an ejection, the backend is half open: it gets a single request, the probe. The first byte of the
    probe ends the ejection, and so does the first successful poll after the backend was down. A request that is refused
    for its own fault is not a failure. A 503 "busy" only pauses the backend, unless its engine is idle while other
    backends are up. A backend that comes up, or whose ejection ends, has a slow start (`warmth`).
    """

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.peers: Peers | None = None
        self.on_event: Callable[[EjectionEvent], None] = lambda _: None
        """Called for each ejection, its end, and the first of consecutive skipped ejections."""
        self.down = True
        self.drained = False  # Gets no new requests (`Backend.drained`), so it does not replace ejected backends.
        self.models: frozenset[str] = frozenset()  # The base models that the backend lists.
        self._failed_polls = 0
        self._refused_polls = 0
        self.answered_s = -inf  # When a poll was last answered.
        self.unanswered_s = inf  # When the first poll after `answered_s` timed out, while other backends answered.
        self._failures = 0
        self._ejections = 0
        self.rate = FailureRate()
        self._suspected = self._by_rate = False
        self.ejected_times = 0
        self.slow = False
        self._skipped_until_s = 0.0
        self.stream_probe = False  # The probe must be a stream, because the backend hung or was slow.
        self.ejected = False
        self._probe: int | None = None
        self._blocked_until_s = 0.0
        self._first_ejected_s = 0.0
        self._slow_start_s: float | None = None

    @property
    def gone(self) -> bool:
        """Whether the process has ended, because several polls in a row were refused."""
        return self._refused_polls >= self.settings.misses_before_down

    def available(self, now: float) -> bool:
        # A process that answered no poll gets no probe: the next poll tests it for free, and a probe delays a request.
        half_open = self._probe is None and not (self.ejected and self.unanswered_s < inf)
        return not self.down and now >= self._blocked_until_s and half_open

    def changes_at(self, now: float) -> float | None:
        """Returns when the availability may change without an event; None if only an event changes it."""
        return self._blocked_until_s if not self.down and now < self._blocked_until_s else None

    def warmth(self, now: float) -> float:
        """Returns the share (0..1] of its batch limit that the backend gets during slow start, in steps of WARM_STEP.

        A backend in slow start has cold caches. With its whole limit, a least-load placement would send it all new
        requests.
        """
        if self._slow_start_s is None:
            return 1.0
        slow_start_s = self.settings.slow_start_s
        share = (now - self._slow_start_s) / slow_start_s if slow_start_s else 1.0
        if share >= 1.0:
            self._slow_start_s = None
            return 1.0
        return max(1, int(share / WARM_STEP)) * WARM_STEP

    def warmer_at(self, now: float) -> float | None:
        """Returns when `warmth` increases next; None after the slow start."""
        if self._slow_start_s is None:
            return None
        warmth = self.warmth(now)
        # Slightly after the edge, so that rounding cannot give the same step again.
        step_s = self.settings.slow_start_s * (warmth + WARM_STEP) * (1.0 + 1e-9)
        return None if self._slow_start_s is None else self._slow_start_s + step_s

    # --- polls ---------------------------------------------------------------------------------------------------

    def poll_succeeded(self, now: float) -> None:
        """Records a successful poll. A backend that was down starts without earlier failures, and with a slow start."""
        if self.down:
            self._slow_start_s = now
            self._by_rate = False
            self._clear(now)
            self._failures = 0
            self.rate.clear()
            self._blocked_until_s = 0.0
        self.down = False
        self._failed_polls = self._refused_polls = 0
        self.answered_s, self.unanswered_s = now, inf

    def poll_timed_out(self, now: float) -> None:
        """Records that the backend did not answer a request of a poll within `poll.timeout_s`."""
        # If no backend answered meanwhile, the proxy paused or the network failed.
        if self.peers is not None and self.peers.others_answered(self, 0.5 * (self.answered_s + now)):
            self.unanswered_s = min(self.unanswered_s, now)

    def poll_failed(self, trouble: Trouble) -> bool:
        """Records a failed poll. Returns whether the process is certainly gone, and its open streams with it.

        Only refused connections prove that: the port of a process that ended refuses at once, while an answer may be
        late because of a long engine step. Unreadable answers, wrong keys and failures of this machine prove
        nothing.
        """
        if trouble is not Trouble.TIMEOUT:
            self.unanswered_s = inf
        if trouble in (Trouble.GARBAGE, Trouble.KEY, Trouble.LOCAL_FAILURE):
            return False
        self._failed_polls += 1
        self._refused_polls = self._refused_polls + 1 if trouble is Trouble.REFUSED else 0
        if trouble is Trouble.UNHEALTHY or self._failed_polls >= self.settings.misses_before_down:
            self.down = True
        return self.gone

    # --- requests --------------------------------------------------------------------------------------------------

    def booked(self, lease: int) -> None:
        if self.ejected:
            self._probe = lease

    def first_byte(self, lease: int, now: float) -> None:
        """Records a first byte. If `lease` is the probe, and the backend is not slow, the ejection ends."""
        self._failures = 0
        if lease == self._probe and not self.slow:
            self._uneject(now)

    def measured(self, lease: int | None, fast: bool, now: float) -> None:
        """Records the measured speed of a backend that was ejected as slow, from the stream of `lease`, or from its
        engine (None).

        Only a fast probe ends the ejection. A fast stream from before the ejection ends the pause, and the probe
        follows. The probe is necessary, because a placement that has learned the slow speed would send the backend no
        request.
        """
        if not fast:
            self._eject("slow: its probe was as slow", now)
        elif self._probe is not None and lease in (None, self._probe):
            self._uneject(now)
        elif self.ejected:
            self._blocked_until_s = min(self._blocked_until_s, now)

    def finished(
        self,
        lease: int,
        verdict: Verdict,
        now: float,
        *,
        idle: bool = False,
        counted: bool = False,
        excused: bool = False,
    ) -> None:
        """Records the end of a lease. `idle`: nothing else is known to run on the backend.

        `counted`: the engine counts its tokens, so only `measured` ends the ejection of a slow backend. `excused`: the
        backend is not to blame, because the request failed in the same way elsewhere or the engine is at work.
        """
        was_probe = lease == self._probe
        if was_probe:
            self._probe = None
        match verdict:
            case Verdict.SERVED:
                self._failures = 0
                self.rate.add(False)
                if self._by_rate and not self.ejected and self.rate.low:
                    self._by_rate, self._ejections = False, 0
                if was_probe and not (self.slow and counted):
                    self._uneject(now)
            case Verdict.CONNECT_FAILED | Verdict.DRAINING | Verdict.ENGINE_DEAD:
                # Further requests would surely fail too, so `ejected_ratio_max` does not apply.
                self._eject(FACTS[verdict], now)
            case Verdict.FAILED | Verdict.TIMED_OUT:
                if not excused:
                    self._failed(was_probe, now)
            case Verdict.UNAUTHORIZED | Verdict.NOT_SERVED:
                if was_probe:
                    self.try_eject(REFUSALS[verdict], now)
                elif excused or (self.peers is not None and not self.peers.others_up(self)):
                    # If no other backend can take the requests, an ejection does not help.
                    self._skip(REFUSALS[verdict], now)
                else:
                    self._blocked_until_s = max(self._blocked_until_s, now + REFUSED_PAUSE_S)
            case Verdict.BUSY:
                # If no other backend can take the requests, an ejection does not help.
                if idle and (self.peers is None or self.peers.others_up(self)):
                    # A refused probe costs the engine nothing, and the engine may have room at any time.
                    self._ejections = min(self._ejections, CHEAP_DOUBLINGS)
                    self._failed(was_probe, now)
                self._blocked_until_s = max(self._blocked_until_s, now + BUSY_PAUSE_S)
            case (
                Verdict.CLIENT_GONE | Verdict.LOST | Verdict.PREEMPTED | Verdict.LOCAL_FAILURE | Verdict.TRANSFER_FAILED
            ):
                pass

    def _failed(self, was_probe: bool, now: float) -> None:
        self._failures += 1
        self.rate.add(True)
        if was_probe:
            self.try_eject("its probe failed", now)
        elif self._failures >= self.settings.failures_before_ejection:
            self._suspect(f"{self._failures} failures in a row", now)
        elif self.peers is not None and not self.ejected:
            others = [health.rate for health in self.peers.members.values() if health is not self and not health.down]
            if (why := self.rate.outlier(others)) is not None and self._suspect(why, now):
                self._by_rate = True
                self.rate.clear()

    def _suspect(self, why: str, now: float) -> bool:
        self._suspected = self.try_eject(why, now)
        return self._suspected

    def forgive(self, verdict: Verdict, now: float) -> None:
        """Reverts a failure with `verdict`, because the request failed in the same way on another backend.

        A pause for a refusal ends, unless the backend is ejected. Other failures are no longer counted, and an ejection
        for the rate or number of failures ends.
        """
        if verdict in REFUSALS:
            self._blocked_until_s = self._blocked_until_s if self.ejected else now
            return
        self._failures = max(0, self._failures - 1)
        self.rate.forgive()
        if self._suspected:
            self._clear(now)
            self._blocked_until_s = now

    def blame(self, verdict: Verdict, now: float) -> None:
        """Ejects the backend for a refusal, if `Peers` allows it, because another backend served the same request.

        Other verdicts than `REFUSALS` change nothing, because `finished` has counted them.
        """
        if verdict in REFUSALS:
            self.try_eject(REFUSALS[verdict], now)

    def eject_hung(self, hang: Hang, now: float) -> bool:
        """Ejects a backend that hangs, if `Peers` allows it. Returns whether it was ejected."""
        if not self.try_eject(hang.why(now), now):
            return False
        # If the backend answered no polls, any request may be the probe: later polls show whether it works again.
        self.stream_probe = not hang.unanswered
        return True

    def eject_slow(self, why: str, now: float) -> bool:
        """Ejects a backend that became slow, if `Peers` allows it. Returns whether it was ejected."""
        if not self.try_eject(why, now):
            return False
        self.slow = self.stream_probe = True
        return True

    def shorten_ejection(self, now: float) -> bool:
        """Shortens the pause of an ejection, because requests wait. Returns whether it was shortened."""
        # A slow probe delays its request for long, and a backend with a high failure rate passes most probes.
        until_s = now + self.settings.ejection_s * 2.0**CHEAP_DOUBLINGS
        if not self.ejected or self.slow or self._by_rate or self._blocked_until_s <= until_s:
            return False
        self._blocked_until_s = until_s
        return True

    def try_eject(self, why: str, now: float) -> bool:
        if not self.ejected and self.peers is not None and not self.peers.may_eject(self):
            self._skip(why, now)
            return False
        self._eject(why, now)
        return True

    def _skip(self, why: str, now: float) -> None:
        # A skip is an event only if none came in the `ejection_max_s` before it.
        if now >= self._skipped_until_s:
            self.on_event(EjectionSkipped(why))
        self._skipped_until_s = now + self.settings.ejection_max_s

    def _uneject(self, now: float) -> None:
        self._clear(now)
        self._slow_start_s = now

    def _clear(self, now: float) -> None:
        if self.ejected:
            self.on_event(Unejected(now - self._first_ejected_s))
        self.ejected, self._probe = False, None
        # A backend that fails a share of its requests passes most probes, so its pauses grow until its rate is low.
        self._ejections = self._ejections if self._by_rate else 0
        self._suspected = False
        self.slow = self.stream_probe = False

    def _eject(self, why: str, now: float) -> None:
        # Many requests may fail at once for the same reason, which is a single ejection.
        if self.ejected and now < self._blocked_until_s:
            return
        pause_s = min(self.settings.ejection_max_s, self.settings.ejection_s * 2.0 ** min(self._ejections, 16))
        if not self.ejected:
            self._first_ejected_s = now
        self._ejections += 1
        self.ejected_times += 1
        self._failures = 0
        self.ejected, self._probe = True, None
        self._blocked_until_s = max(self._blocked_until_s, now + pause_s)
        self.on_event(Ejected(why, pause_s))
