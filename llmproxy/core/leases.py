"""What is in flight in one pool: who holds which backend, what it is charged for that, and who hears how it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.outlier_detection import OutlierDetection
from llmproxy.core.domain import Placed, Request, Revoke, Usage, Verdict
from llmproxy.core.estimates.first_token import FirstToken
from llmproxy.core.placement import Placement
from llmproxy.core.policy_registry import Faults
from llmproxy.core.preemption import Preemption
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.fairness import FairnessPolicy
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import Settings


@dataclass(slots=True)
class _Lease:
    """A booking, what its flow is charged so far (by the `fairness` of its band), and how its grant changed what bands
    are owed.

    `elsewhere`: it runs on a process that another one has taken the place of, and whose end is not that one's.
    """

    request: Request
    backend: Backend
    fairness: FairnessPolicy
    at_s: float
    charged: float = 0.0
    credits: Mapping[int, float] = field(default_factory=dict)
    elsewhere: bool = False


class Leases:
    """The ledger of one pool: every lease from its grant to its return, by its number.

    What happens to a lease is told here once, and from here to all that follow it: its backend, the watch over those
    that hang, the placement, usage limits, preemption, and its flow, which is charged an estimate with the grant, more
    where the answer grows beyond it, and what it really took in the end. `serial` numbers the leases of all pools, in
    the order in which they are granted. Policies are told last, and what they raise goes to `faults`: an account of the
    core is settled whatever a policy does.
    """

    def __init__(
        self,
        settings: Settings,
        serial: Iterator[int],
        room: WaitingRoom,
        placement: Placement,
        watch: OutlierDetection,
        limits: UsageLimits,
        preemption: Preemption,
        min_shares: MinShares,
        first_token: FirstToken,
        faults: Faults,
    ) -> None:
        self._serial = serial
        self._room = room
        self._placement = placement
        self._watch = watch
        self._limits = limits
        self._preemption = preemption
        self._min_shares = min_shares
        self._first_token = first_token
        self._tell = faults.tell
        self._charge = charges.get(settings.charged)(settings)
        self._held: dict[int, _Lease] = {}
        self._revoked: list[int] = []
        self._newest = 0
        self._void: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    # --- backends, and the processes behind them -----------------------------------------------------------------

    def attach(self, backend: str) -> None:
        """A backend came into the pool; what other pools had there is not of this one."""
        self._void[backend] = self._newest

    def detach(self, backend: str) -> None:
        """A backend left the pool; its leases run on."""
        del self._void[backend]
        self._forget(backend)

    def lost(self, backend: Backend) -> None:
        """The process behind a backend is gone, and its leases are to be revoked."""
        self._forget_process(backend)
        self._revoked += [x for x, held in self._held.items() if held.backend is backend and not held.elsewhere]

    def replaced(self, backend: Backend) -> None:
        """Another process goes by the name of a backend; what the old one has runs on, whatever the new one does."""
        self._forget_process(backend)
        for held in self._held.values():
            held.elsewhere = held.elsewhere or held.backend is backend

    def hung(self, backend: str) -> None:
        """A backend is believed to bring nothing any more: what it has not begun is to be tried elsewhere."""
        self._revoked += self._watch.give_up(backend)

    def take_revoked(self) -> list[Revoke]:
        """The leases to be revoked since this was last asked, less those that have ended meanwhile."""
        if not self._revoked:
            return []
        leases, self._revoked = self._revoked, []
        known = [(lease, self._held[lease]) for lease in leases if lease in self._held]
        return [Revoke(lease, held.request, held.backend.name) for lease, held in known]

    def _forget_process(self, backend: Backend) -> None:
        # Lease numbers rise: those up to this one had the process that is gone.
        if backend.name in self._void:
            self._void[backend.name] = self._newest
        self._forget(backend.name)

    def _forget(self, backend: str) -> None:
        self._watch.forget(backend)
        self._tell(self._placement.lost, backend)

    # --- the life of a lease -------------------------------------------------------------------------------------

    def book(self, request: Request, placed: Placed, backend: Backend, now: float, *, guaranteed: bool) -> int:
        """Open a lease and answer its number. `guaranteed`: its band has it by its minimum share."""
        lease = self._newest = next(self._serial)
        cold = backend.lacks(request.adapter)
        backend.book(lease, request, now, placed.held_tokens)
        self._limits.booked(request)
        self._watch.booked(lease, request, placed, cold, now)
        if not guaranteed:
            # What a band is granted by its minimum share is not to be taken back by those who waited above it.
            self._preemption.booked(lease, request, backend)
        self._held[lease] = _Lease(request, backend, self._room.band(request.band).fairness, now)
        self._tell(self._placement.booked, lease, request, placed, now)
        return lease

    def granted(self, lease: int, now: float) -> None:
        """The decision is made: tell the policy that chose whose turn it was, and charge the flow what is expected."""
        held = self._held[lease]
        request = held.request
        self._tell(held.fairness.dispatched, request.flow)
        if not request.stream:
            # Nobody can see its first token; that it was granted in time is what can be known.
            self._tell(held.fairness.started, request, now)
        self._tell(self._charge_expected, held)
        if self._min_shares.shares:
            held.credits = self._min_shares.granted(request.band, held.charged, self._room.levels())

    def started(self, lease: int, now: float) -> None:
        """The first byte of the answer arrived."""
        held = self._held[lease]
        held.backend.started(lease, now)
        self._watch.started(lease, now)
        self._preemption.closed(lease)
        self._tell(self._placement.started, lease, now)
        if held.request.stream:
            self._tell(held.fairness.started, held.request, now)
            self._first_token.learn(held.request.prompt_tokens, now - held.at_s)

    def committed(self, lease: int, now: float) -> None:
        """A byte went to the client, be it a token or not: from here on its request stays where it is."""
        self._preemption.closed(lease)
        self._watch.committed(lease, now)

    def progress(self, lease: int, output_tokens: int, now: float) -> None:
        """The answer has about so many tokens by now: charge what exceeds the estimate."""
        held = self._held[lease]
        reading = held.backend.reading
        kv_used = reading.kv_used if reading is not None else None
        fast = self._watch.progress(lease, output_tokens, held.backend.sequences, kv_used, now)
        if fast is not None and held.backend.health.slow:
            held.backend.paced(lease, fast, now)
        self._tell(self._charge_so_far, held, output_tokens, now)

    def finish(self, lease: int, verdict: Verdict, now: float, usage: Usage | None = None) -> None:
        """Return a lease. `usage` is what the engine counted, or the tokens seen so far where it was cut short."""
        held = self._held.pop(lease)
        held.backend.release(lease, verdict, now, usage.output_tokens if usage is not None else 0)
        self._watch.finished(lease, now)
        self._preemption.closed(lease)
        self._limits.released(held.request, _used_tokens(held.request, verdict, usage), now)
        self._tell(self._placement.finished, lease, verdict, usage, now)
        if verdict is not Verdict.SERVED and (usage is None or not (usage.prompt_tokens or usage.output_tokens)):
            # The attempt gave nothing: a retry is charged anew, and a failure is not the client's debt.
            self._min_shares.undone(held.credits, held.charged)
            self._tell(self._charge_to, held, 0.0)
        elif usage is not None:
            self._tell(self._charge_final, held, usage, now)

    def cached(self, lease: int, backend: str, hashes: Sequence[int]) -> None:
        """The prompt and the answer of a lease that was returned are these blocks, which its backend holds."""
        # What is not of this pool any more is remembered by nobody, and must not be learned anew.
        if backend in self._void and lease > self._void[backend]:
            self._tell(self._placement.cached, backend, hashes)

    def _charge_expected(self, held: _Lease) -> None:
        self._charge_to(held, self._charge.estimate(held.request))

    def _charge_so_far(self, held: _Lease, output_tokens: int, now: float) -> None:
        so_far = self._charge.so_far(held.request, output_tokens, now - held.at_s)
        if so_far > held.charged:
            self._charge_to(held, so_far)

    def _charge_final(self, held: _Lease, usage: Usage, now: float) -> None:
        self._charge_to(held, self._charge.final(held.request, usage, now - held.at_s))

    def _charge_to(self, held: _Lease, cost: float) -> None:
        held.fairness.charge(held.request.flow, (cost - held.charged) / held.request.weight)
        held.charged = cost

    # --- looking in ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError when two accounts of the same thing differ."""
        booked = {lease: held.backend for lease, held in self._held.items()}
        for backend in {id(backend): backend for backend in booked.values()}.values():
            backend.check()
            mine = {lease for lease, owner in booked.items() if owner is backend}
            assert mine <= backend.bookings.keys(), "a lease is not booked on its backend"


def _used_tokens(request: Request, verdict: Verdict, usage: Usage | None) -> int | None:
    """What an attempt used of a limit of tokens: as counted, else as expected of a whole answer, else unknown."""
    if usage is not None:
        return usage.prompt_tokens + usage.output_tokens
    return request.prompt_tokens + request.output_tokens if verdict is Verdict.SERVED else None
