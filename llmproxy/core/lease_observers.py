"""The observers of leases: charging of flows, usage limits, reservations, blame, placement and outlier detection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.outlier_detection import OutlierDetection
from llmproxy.core.domain import DECODE, PREFILL, Request, Verdict
from llmproxy.core.estimates.line import FirstToken
from llmproxy.core.lease_events import Committed, Progress, Recomputing, Returned, Started
from llmproxy.core.leases import LeaseObserver, LeaseRecord
from llmproxy.core.placement.policy import Placement
from llmproxy.core.placement.staged import StagedPlacement
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.queueing.rate_limits import charged_usage
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import Settings

_DOUBTFUL = frozenset({Verdict.FAILED, Verdict.TIMED_OUT, Verdict.UNAUTHORIZED, Verdict.NOT_SERVED})


class _Charge(Struct, eq=False):
    """The cost that a flow was charged for an open lease and the earlier leases of its request."""

    total: float  # The whole charge so far, with `carried`.
    carried: float  # Charged to earlier leases of the request.
    prompt: float  # The final part of `carried`: all of it for a decode stage, because its prompt is computed; else 0.
    credits: Mapping[int, float] = {}  # Band -> change of its credit, as returned by `MinShares.granted`.


class ChargeObserver(LeaseObserver):
    """Charges flows for their requests, and credits the minimum shares of bands.

    A flow is charged an estimate at the grant, more when the answer grows beyond the estimate, and the actual cost at
    the end. A failed attempt without known tokens costs nothing, and its retry is charged again.

    The charge for a prefill stage is carried over to the next lease of the request. So a prompt is charged once even if
    a second backend computes it again, and the charge is refunded if no answer follows.

    The rest of a stream that broke is charged for its output only. The fairness policy and the minimum shares do not
    count it as another request.
    """

    def __init__(self, settings: Settings, room: WaitingRoom, min_shares: MinShares, faults: Faults) -> None:
        self.charge = charges.get(settings.fairness_cost)(settings)
        self._room = room
        self._min_shares = min_shares
        self._faults = faults
        self._charges: dict[int, _Charge] = {}
        self.between: dict[str, float] = {}  # Id of a request between two leases -> its charge so far.

    def booked(self, lease: LeaseRecord, now: float) -> None:
        request = lease.request
        band = self._room.bands[request.band]
        carried = self.between.pop(request.id, 0.0)
        prompt = carried if request.stage is DECODE else 0.0
        charge = self._charges[lease.number] = _Charge(carried, carried, prompt)
        try:
            if request.stage is not DECODE and not request.continued:
                band.fairness.dispatched(request.flow)
            if band.on_started is not None and not request.stream:
                # The first token is not visible without a stream, so the grant counts as the start.
                band.on_started(request, now)
        except Exception as fault:  # noqa: BLE001 - a policy may be a plugin
            self._faults.note(fault)
        try:
            self._charge_to(request, charge, prompt + self.charge.estimate(request))
        except Exception as fault:  # noqa: BLE001 - a policy may be a plugin
            self._faults.note(fault)
        own = charge.total - carried
        if self._min_shares.shares and own > 0.0 and not request.continued:
            charge.credits = self._min_shares.granted(request.band, own, self._room.levels())

    def already_charged(self, request: Request, number: int) -> None:
        """Reverts the charge of a new lease, because the restored flow balances include it."""
        fairness = self._room.bands[request.band].fairness
        charge = self._charges[number]
        more = (charge.carried - charge.total) / request.weight
        self._faults.notify(fairness.charge, request.flow, more)

    def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
        request = lease.request
        on_started = self._room.bands[request.band].on_started
        if on_started is not None and request.stream and request.stage is not PREFILL:
            self._faults.notify(on_started, request, now)

    def progress(self, lease: LeaseRecord, event: Progress, now: float) -> None:
        request, charge = lease.request, self._charges[lease.number]
        try:
            so_far = charge.prompt + self.charge.so_far(request, event.output_tokens)
            if so_far > charge.total:
                self._charge_to(request, charge, so_far)
        except Exception as fault:  # noqa: BLE001 - a policy may be a plugin
            self._faults.note(fault)

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        request, usage, verdict = lease.request, event.usage, event.verdict
        charge = self._charges.pop(lease.number)
        tokens = None if usage is None else usage.prompt_tokens + usage.output_tokens
        # A refused decode stage counts as served, and the whole request follows.
        wasted = (verdict is not Verdict.SERVED and not tokens) or (request.stage is DECODE and tokens == 0)
        if wasted:
            self._min_shares.undone(charge.credits, charge.total - charge.carried)
        try:
            if wasted:
                self._charge_to(request, charge, charge.carried)
            elif usage is not None:
                self._charge_to(request, charge, charge.prompt + self.charge.final(request, usage))
        except Exception as fault:  # noqa: BLE001 - a policy may be a plugin
            self._faults.note(fault)
        carried = charge.carried
        if not wasted:
            carried = charge.total if request.stage is PREFILL and decode_follows(lease, event) else 0.0
        if carried:
            self.between[request.id] = carried

    def ended(self, request: Request) -> None:
        """Refunds the charge of a prefill stage if no answer followed."""
        carried = self.between.pop(request.id, 0.0)
        if carried:
            fairness = self._room.bands[request.band].fairness
            self._faults.notify(fairness.charge, request.flow, -carried / request.weight)

    def _charge_to(self, request: Request, charge: _Charge, total: float) -> None:
        self._room.bands[request.band].fairness.charge(request.flow, (total - charge.total) / request.weight)
        charge.total = total


def decode_follows(lease: LeaseRecord, event: Returned) -> bool:
    """Returns whether a prefill stage succeeded. A refused prompt also ends with SERVED, but without a token."""
    return lease.request.stage is PREFILL and event.verdict is Verdict.SERVED and lease.started


class ReservationObserver(LeaseObserver):
    """Reserves slots on decode backends from the grant of prefill stages until the decode stages begin."""

    only_stages = True

    def __init__(self) -> None:
        self.by_request: dict[str, LeaseRecord] = {}  # Request id -> the lease of its prefill stage.

    def booked(self, lease: LeaseRecord, now: float) -> None:
        if lease.answers_on is not None:
            # A process that becomes the leader of a cluster, or a member again, resumes its own leases.
            self.release(lease.request.id)
            self.by_request[lease.request.id] = lease
            lease.answers_on.reserve_slots(lease.request.sequences)

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        if self.by_request.get(lease.request.id) is lease and not decode_follows(lease, event):
            self.release(lease.request.id)

    def release(self, request_id: str) -> str | None:
        """Releases the slots of a request. Returns its prefill backend; None without a reservation."""
        lease = self.by_request.pop(request_id, None)
        if lease is None or lease.answers_on is None:
            return None
        lease.answers_on.reserve_slots(-lease.request.sequences)
        return lease.backend.name

    def check(self) -> None:
        reserved = Counter[Backend]()
        for lease in self.by_request.values():
            assert lease.answers_on is not None
            reserved[lease.answers_on] += lease.request.sequences
        for backend, mine in reserved.items():
            assert backend.reserved >= mine, "a reservation is not counted on its backend"


class TransferObserver(LeaseObserver):
    """Tracks which backends pin the KV blocks of prefilled prompts, and reports the KV transfers to the placement.

    The blocks are pinned from the end of the prefill until the decode stage starts or fails, at most for the KV lease.
    """

    only_stages = True

    def __init__(self, placement: StagedPlacement) -> None:
        self._placement = placement

    def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
        if lease.prefilled_on is not None:
            lease.prefilled_on.unpin_kv(lease.request.id)

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        if decode_follows(lease, event):
            lease.backend.pin_kv(lease.request.id, now + self._placement.settings.lease_s, now)
            return
        first = lease.backend if lease.request.stage is PREFILL else lease.prefilled_on
        if first is None:
            return
        first.unpin_kv(lease.request.id)
        arrived = event.verdict is Verdict.SERVED and lease.prefilled_on is not None and lease.started
        if arrived or event.verdict is Verdict.TRANSFER_FAILED:
            self._placement.transferred(first.name, now, arrived=arrived)

    def process_gone(self, backend: str) -> None:
        self._placement.forget_transfers(backend)


class LimitObserver(LeaseObserver):
    """Counts leases and their tokens toward the usage limits of tenants and models."""

    only_limited = True

    def __init__(self, limits: UsageLimits) -> None:
        self._limits = limits

    def booked(self, lease: LeaseRecord, now: float) -> None:
        self._limits.booked(lease.request)

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        used_tokens: float | None = None
        if (charged := charged_usage(lease.request, event.verdict, event.usage)) is not None:
            used_tokens = charged.output_tokens + (0 if lease.request.continued else charged.prompt_tokens)
        if decode_follows(lease, event):
            self._limits.begin_between_stages(lease.request)
        else:
            self._limits.released(lease.request, used_tokens, now)


class PlacementObserver(LeaseObserver):
    """Passes the events of leases to the placement. Exceptions of the placement are collected and not raised."""

    def __init__(self, placement: Placement, faults: Faults) -> None:
        self._placement = placement
        self._faults = faults

    def booked(self, lease: LeaseRecord, now: float) -> None:
        try:
            self._placement.booked(lease.number, lease.request, lease.placed, now)
        except Exception as fault:  # noqa: BLE001 - a placement may be a plugin
            self._faults.note(fault)

    def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
        try:
            self._placement.started(lease.number, now)
        except Exception as fault:  # noqa: BLE001 - a placement may be a plugin
            self._faults.note(fault)

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        try:
            self._placement.finished(lease.number, event.verdict, event.usage, now)
        except Exception as fault:  # noqa: BLE001 - a placement may be a plugin
            self._faults.note(fault)

    def recomputing(self, lease: LeaseRecord, event: Recomputing, now: float) -> None:
        self._faults.notify(self._placement.recomputing, lease.number)

    def process_gone(self, backend: str) -> None:
        self._faults.notify(self._placement.lost, backend)


class BlameObserver(LeaseObserver):
    """Decides whether a failed attempt is the fault of the request or of its backend.

    The same failure on two backends blames the request. If a backend refuses a request, and another backend serves it,
    the first backend is blamed. A time limit does not blame a backend whose metrics show running sequences, and the
    request is not retried.
    """

    def __init__(self) -> None:
        # Request id -> the backends on which the request failed, with a verdict that may be the request's fault.
        self.failed: dict[str, list[tuple[Backend, Verdict]]] = {}
        self.too_long: set[str] = set()  # Ids of requests that reached a time limit on a backend at work.

    def excuses(self, lease: LeaseRecord, verdict: Verdict, now: float) -> bool:
        if verdict not in _DOUBTFUL:
            return False
        if verdict is Verdict.TIMED_OUT and lease.backend.at_work(now):
            self.too_long.add(lease.request.id)
            return True
        failed = self.failed.setdefault(lease.request.id, [])
        same = [backend for backend, before in failed if before is verdict and backend is not lease.backend]
        if len(same) == 1:
            same[0].forgive(verdict, now)
        failed.append((lease.backend, verdict))
        return bool(same)

    def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
        if self.failed:
            for backend, verdict in self.failed.pop(lease.request.id, ()):
                backend.blame(verdict, now)

    def ended(self, request_id: str) -> None:
        self.failed.pop(request_id, None)
        self.too_long.discard(request_id)


class OutlierObserver(LeaseObserver):
    """Reports answers to the outlier detection, and its judgement to backends that were ejected as slow."""

    def __init__(self, detection: OutlierDetection) -> None:
        self._detection = detection

    def booked(self, lease: LeaseRecord, now: float) -> None:
        self._detection.booked(lease.number, lease.request, lease.placed, lease.cold, now)

    def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
        self._detection.started(lease.number, now)

    def committed(self, lease: LeaseRecord, event: Committed, now: float) -> None:
        self._detection.committed(lease.number, now)

    def progress(self, lease: LeaseRecord, event: Progress, now: float) -> None:
        backend = lease.backend
        kv_used = backend.reading.kv_used if backend.reading is not None else None
        fast = self._detection.progress(lease.number, event.output_tokens, backend.own_in_flight, kv_used, now)
        if fast is not None and backend.health.slow:
            backend.measured(lease.number, fast, now)

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        served = event.usage if event.verdict is Verdict.SERVED else None
        self._detection.finished(lease.number, now, served, lease.backend.own_in_flight)

    def process_gone(self, backend: str) -> None:
        self._detection.forget(backend)


class FirstTokenObserver(LeaseObserver):
    """Learns the time from the grant to the first token of a stream, or to the end of a prefill stage."""

    def __init__(self, first_token: FirstToken) -> None:
        self._first_token = first_token

    def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
        if lease.request.stream and lease.request.stage is not DECODE:
            self._first_token.learn(lease.request.prompt_tokens, now - lease.at_s)
