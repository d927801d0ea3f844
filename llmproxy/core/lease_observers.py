"""The observers of leases: what flows are charged, what counts under limits, and who hears how a lease went."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.outlier_detection import OutlierDetection
from llmproxy.core.domain import DECODE, PREFILL, Request, Usage, Verdict
from llmproxy.core.estimates.line import FirstToken
from llmproxy.core.leases import LeaseObserver, LeaseRecord
from llmproxy.core.placement.policy import Placement
from llmproxy.core.placement.staged import StagedPlacement
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import Settings

_DOUBTFUL = frozenset({Verdict.FAILED, Verdict.TIMED_OUT, Verdict.UNAUTHORIZED, Verdict.NOT_SERVED})


class ChargeObserver(LeaseObserver):
    """Charges flows, and credits the minimum shares of bands.

    A flow is charged an estimate at the grant, more when the answer grows beyond it, and the real cost at the end. An
    attempt that gave nothing costs nothing: its retry is charged anew, and a failure is not the client's debt.

    What was charged for a prompt that another backend computed goes over to the next lease of its request. So a prompt
    is paid once where a backend then computes it again with the whole, and not at all where no answer comes.
    """

    def __init__(self, settings: Settings, room: WaitingRoom, min_shares: MinShares, faults: Faults) -> None:
        self.charge = charges.get(settings.charged)(settings)
        self._room = room
        self._min_shares = min_shares
        self._notify = faults.notify
        self._charged: dict[int, float] = {}
        self._carried: dict[int, float] = {}
        self._between: dict[str, float] = {}
        self._credits: dict[int, Mapping[int, float]] = {}

    def booked(self, lease: LeaseRecord, now: float) -> None:
        request, fairness = lease.request, self._room.band(lease.request.band).fairness
        self._charged[lease.number] = self._carried[lease.number] = self._between.pop(request.id, 0.0)
        if request.stage is not DECODE:
            self._notify(fairness.dispatched, request.flow)
        if not request.stream:
            # Its first token cannot be seen; all that can be known is that it was granted in time.
            self._notify(fairness.started, request, now)
        self._notify(self._charge_by, lease, self.charge.estimate)
        own = self._own(lease)
        if self._min_shares.shares and own > 0.0:
            self._credits[lease.number] = self._min_shares.granted(request.band, own, self._room.levels())

    def taken_over(self, request: Request, number: int) -> None:
        """What was just booked was charged by another process, whose balances were restored."""
        fairness = self._room.band(request.band).fairness
        self._notify(fairness.charge, request.flow, (self._carried[number] - self._charged[number]) / request.weight)

    def started(self, lease: LeaseRecord, now: float) -> None:
        if lease.request.stream and lease.request.stage is not PREFILL:
            self._notify(self._room.band(lease.request.band).fairness.started, lease.request, now)

    def progress(self, lease: LeaseRecord, output_tokens: int, now: float) -> None:
        self._notify(self._charge_so_far, lease, output_tokens, now)

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        tokens = None if usage is None else usage.prompt_tokens + usage.output_tokens
        carried = self._carried[lease.number]
        # A second stage that was refused is served as well, and the whole comes after it.
        if (verdict is not Verdict.SERVED and not tokens) or (lease.request.stage is DECODE and tokens == 0):
            self._min_shares.undone(self._credits.get(lease.number, {}), self._own(lease))
            self._notify(self._charge_to, lease, carried)
        else:
            if usage is not None:
                self._notify(self._charge_by, lease, self.charge.final, usage, now - lease.at_s)
            carried = self._charged[lease.number] if goes_on(lease, verdict) else 0.0
        if carried:
            self._between[lease.request.id] = carried
        del self._charged[lease.number], self._carried[lease.number]
        self._credits.pop(lease.number, None)

    def ended(self, request: Request) -> None:
        """The request is over, perhaps without an answer to the prompt that was computed for it."""
        carried = self._between.pop(request.id, 0.0)
        if carried:
            fairness = self._room.band(request.band).fairness
            self._notify(fairness.charge, request.flow, -carried / request.weight)

    def _own(self, lease: LeaseRecord) -> float:
        """What was charged beyond what the lease took over."""
        return self._charged[lease.number] - self._carried[lease.number]

    def _charge_by(self, lease: LeaseRecord, cost: Callable[..., float], *known: object) -> None:
        self._charge_to(lease, self._prompt(lease) + cost(lease.request, *known))

    def _prompt(self, lease: LeaseRecord) -> float:
        """What was charged for a prompt that this lease does not compute."""
        return self._carried[lease.number] if lease.request.stage is DECODE else 0.0

    def _charge_so_far(self, lease: LeaseRecord, output_tokens: int, now: float) -> None:
        so_far = self._prompt(lease) + self.charge.so_far(lease.request, output_tokens, now - lease.at_s)
        if so_far > self._charged[lease.number]:
            self._charge_to(lease, so_far)

    def _charge_to(self, lease: LeaseRecord, cost: float) -> None:
        request = lease.request
        more = (cost - self._charged[lease.number]) / request.weight
        self._room.band(request.band).fairness.charge(request.flow, more)
        self._charged[lease.number] = cost


def goes_on(lease: LeaseRecord, verdict: Verdict) -> bool:
    """Whether the request of a lease that ends so goes on with its answer, on another backend.

    An engine that refused the prompt has served it as well, but computed nothing.
    """
    return lease.request.stage is PREFILL and verdict is Verdict.SERVED and lease.started


class PlaceObserver(LeaseObserver):
    """Keeps the places for answers whose prompts are computed on other backends.

    A place is kept from the grant of the prompt until the answer is granted, or the request ends without one.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Backend, int, str]] = {}

    def __len__(self) -> int:
        """Requests for which a place is kept."""
        return len(self._kept)

    def booked(self, lease: LeaseRecord, now: float) -> None:
        if lease.answers_on is not None:
            self._kept[lease.request.id] = lease.answers_on, lease.request.sequences, lease.backend.name
            lease.answers_on.keep_place(lease.request.sequences)

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        if lease.answers_on is not None and not goes_on(lease, verdict):
            self.give_up(lease.request.id)

    def give_up(self, request_id: str) -> str | None:
        """Keep no place for a request any more; returns the backend of its prompt where one was kept."""
        if request_id not in self._kept:
            return None
        backend, sequences, prefilled_on = self._kept.pop(request_id)
        backend.keep_place(-sequences)
        return prefilled_on

    def check(self) -> None:
        for backend in {id(one[0]): one[0] for one in self._kept.values()}.values():
            mine = sum(sequences for keeper, sequences, _ in self._kept.values() if keeper is backend)
            assert backend.kept >= mine, "a place that is kept for an answer is not counted"


class TransferObserver(LeaseObserver):
    """Notes on each backend for whom it keeps a computed prompt, and tells `placement` whether prompts arrive.

    A prompt is kept from the end of the prefill until its answer begins or fails, and for a lease at most.
    """

    def __init__(self, placement: StagedPlacement) -> None:
        self._placement = placement

    def started(self, lease: LeaseRecord, now: float) -> None:
        if lease.prefilled_on is not None:
            lease.prefilled_on.fetched(lease.request.id)

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        if goes_on(lease, verdict):
            lease.backend.keep_for(lease.request.id, now + self._placement.settings.lease_s, now)
            return
        first = lease.backend if lease.request.stage is PREFILL else lease.prefilled_on
        if first is None:
            return
        first.fetched(lease.request.id)
        arrived = verdict is Verdict.SERVED and lease.prefilled_on is not None and lease.started
        if arrived or verdict is Verdict.TRANSFER_FAILED:
            self._placement.transferred(first.name, now, arrived=arrived)


class LimitObserver(LeaseObserver):
    """Counts leases and their tokens under usage limits."""

    def __init__(self, limits: UsageLimits) -> None:
        self._limits = limits

    def booked(self, lease: LeaseRecord, now: float) -> None:
        if lease.request.limits:
            self._limits.booked(lease.request)

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        if not lease.request.limits:
            return
        used_tokens = None
        if usage is not None:
            used_tokens = usage.prompt_tokens + usage.output_tokens
        elif verdict is Verdict.SERVED:
            # The engine did not count: the whole answer is taken to be as expected.
            used_tokens = lease.request.prompt_tokens + lease.request.output_tokens
        if goes_on(lease, verdict):
            self._limits.begin_between_stages(lease.request)
        else:
            self._limits.released(lease.request, used_tokens, now)


class PlacementObserver(LeaseObserver):
    """Notifies a placement of what became of its choices. Faults that the placement raises are noted."""

    def __init__(self, placement: Placement, faults: Faults) -> None:
        self._placement = placement
        self._notify = faults.notify

    def booked(self, lease: LeaseRecord, now: float) -> None:
        self._notify(self._placement.booked, lease.number, lease.request, lease.placed, now)

    def recomputing(self, lease: LeaseRecord) -> None:
        self._notify(self._placement.recomputing, lease.number)

    def started(self, lease: LeaseRecord, now: float) -> None:
        self._notify(self._placement.started, lease.number, now)

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        self._notify(self._placement.finished, lease.number, verdict, usage, now)

    def process_gone(self, backend: str) -> None:
        self._notify(self._placement.lost, backend)


class BlameObserver(LeaseObserver):
    """Decides between a request and its backends which is to blame for a failed attempt.

    The same failure on two backends blames the request. A backend that refuses is blamed as soon as another one serves
    the same request. A backend whose gauges show it at work is not blamed for a prompt that takes too long, and such a
    request is not computed again.
    """

    def __init__(self) -> None:
        self._failed: dict[str, list[tuple[Backend, Verdict]]] = {}
        self._too_long: set[str] = set()

    def excuses(self, lease: LeaseRecord, verdict: Verdict, now: float) -> bool:
        if verdict not in _DOUBTFUL:
            return False
        if verdict is Verdict.TIMED_OUT and lease.backend.at_work(now):
            self._too_long.add(lease.request.id)
            return True
        failed = self._failed.setdefault(lease.request.id, [])
        same = [backend for backend, before in failed if before is verdict and backend is not lease.backend]
        if len(same) == 1:
            same[0].forgive(verdict, now)
        failed.append((lease.backend, verdict))
        return bool(same)

    def started(self, lease: LeaseRecord, now: float) -> None:
        if self._failed:
            for backend, verdict in self._failed.pop(lease.request.id, ()):
                backend.to_blame(verdict, now)

    def too_long(self, request_id: str) -> bool:
        """Whether the request met a time limit on a backend that was at work."""
        return request_id in self._too_long

    def ended(self, request_id: str) -> None:
        self._failed.pop(request_id, None)
        self._too_long.discard(request_id)


class OutlierObserver(LeaseObserver):
    """Reports to the outlier detection how fast answers come, and to a slow backend that it became fast."""

    def __init__(self, detection: OutlierDetection) -> None:
        self._detection = detection

    def booked(self, lease: LeaseRecord, now: float) -> None:
        self._detection.booked(lease.number, lease.request, lease.placed, lease.cold, now)

    def started(self, lease: LeaseRecord, now: float) -> None:
        self._detection.started(lease.number, now)

    def committed(self, lease: LeaseRecord, now: float) -> None:
        self._detection.committed(lease.number, now)

    def progress(self, lease: LeaseRecord, output_tokens: int, now: float) -> None:
        backend = lease.backend
        kv_used = backend.reading.kv_used if backend.reading is not None else None
        fast = self._detection.progress(lease.number, output_tokens, backend.sequences, kv_used, now)
        if fast is not None and backend.health.slow:
            backend.measured(lease.number, fast, now)

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        served = usage if verdict is Verdict.SERVED else None
        self._detection.finished(lease.number, now, served, lease.backend.sequences)

    def process_gone(self, backend: str) -> None:
        self._detection.forget(backend)


class FirstTokenObserver(LeaseObserver):
    """Learns how long the first token of a stream takes after its grant."""

    def __init__(self, first_token: FirstToken) -> None:
        self._first_token = first_token

    def started(self, lease: LeaseRecord, now: float) -> None:
        if lease.request.stream and lease.request.stage is not DECODE:
            self._first_token.learn(lease.request.prompt_tokens, now - lease.at_s)
