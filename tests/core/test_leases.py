"""The leases of one pool: charges of flows, revocations, and events of observers."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import Placed, Usage, Verdict
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.lease_observers import ChargeObserver
from llmproxy.core.leases import LeaseObserver, LeaseRecord, Leases
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.fairness.fair_share import FairShare
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.queueing.occupancy import DrainRate, Occupancy
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from tests.core.make import DEFAULTS, request

SETTINGS = replace(DEFAULTS, input_weight=1.0, output_weight=2.0)


class Ledger:
    """`Leases` of two backends, with a waiting room whose flows are charged."""

    def __init__(self) -> None:
        limits = UsageLimits({})
        self.faults = Faults()
        self.room = WaitingRoom(SETTINGS, Occupancy(SETTINGS.queue), limits, self.faults, lambda *_: 0, DrainRate())
        charges = ChargeObserver(SETTINGS, self.room, MinShares({}), self.faults)
        self.leases = Leases(count(1), [charges])
        self.backends = {name: Backend(name, SETTINGS.capacity, SETTINGS.health) for name in "ab"}
        for name in self.backends:
            self.leases.attach(name)

    def grant(self, backend: str = "a") -> int:
        """Books a request with 10 prompt tokens and 10 expected output tokens."""
        placed = Placed(backend, 0.0, (), 1)
        return self.leases.book(request(), placed, self.backends[backend], 0.0)

    def charged(self) -> float:
        fairness = self.room.bands[0].fairness
        assert isinstance(fairness, FairShare)
        return dict(fairness.standing("flow"))["counter"]

    def revoked(self) -> list[int]:
        self.leases.check()
        return [revoke.lease for revoke in self.leases.take_revoked()]


def test_a_flow_is_charged_the_estimate_then_the_stream_then_the_usage() -> None:
    of = Ledger()
    lease = of.grant()
    assert of.charged() == 10 + 2 * 10
    of.leases.apply(Progress(lease, 5), 1.0)
    assert of.charged() == 10 + 2 * 10, "fewer tokens than expected, so far, say nothing"
    of.leases.apply(Progress(lease, 50), 2.0)
    assert of.charged() == 10 + 2 * 50
    of.leases.apply(Returned(lease, Verdict.SERVED, Usage(10, 60, cached_tokens=4)), 3.0)
    assert of.charged() == 6 + 2 * 60
    assert not of.leases


@pytest.mark.parametrize(
    ("verdict", "usage", "charged"),
    [
        *[(verdict, None, 0.0) for verdict in Verdict if verdict is not Verdict.SERVED],
        (Verdict.FAILED, Usage(0, 0), 0.0),
        (Verdict.CLIENT_GONE, Usage(10, 3), 10 + 2 * 3),
        (Verdict.SERVED, None, 10 + 2 * 10),
    ],
)
def test_an_attempt_that_gave_nothing_is_nobodys_debt(verdict: Verdict, usage: Usage | None, charged: float) -> None:
    of = Ledger()
    of.leases.apply(Returned(of.grant(), verdict, usage), 1.0)
    assert of.charged() == charged


def test_a_lease_on_a_replaced_process_outlives_its_successor() -> None:
    of = Ledger()
    of.grant("a")
    of.leases.replaced(of.backends["a"])
    newer = of.grant("a")
    of.leases.lost(of.backends["a"])
    assert of.revoked() == [newer]


def test_leases_are_checked_against_the_bookings_of_their_backends() -> None:
    of = Ledger()
    lease = of.grant("a")
    of.backends["a"].release(lease, Verdict.SERVED, 1.0)
    with pytest.raises(AssertionError, match="not booked"):
        of.leases.check()


def test_an_observer_is_called_for_the_events_that_it_overrides() -> None:
    heard: list[tuple[str, int]] = []

    class Starts(LeaseObserver):
        def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
            heard.append((lease.request.flow, lease.number))

    backend = Backend("a", SETTINGS.capacity, SETTINGS.health)
    leases = Leases(count(1), [LeaseObserver(), Starts()])
    events = leases._observers[True, True].events
    assert (len(events[Started]), events[Progress]) == (1, [])
    lease = leases.book(request(), Placed("a", 0.0, (), 1), backend, 0.0)
    leases.apply(Progress(lease, 5), 1.0)
    leases.apply(Started(lease), 1.0)
    assert heard == [("flow", lease)]


def test_a_flow_is_charged_though_its_policy_fails_at_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise ValueError("a plugin's bug")

    of = Ledger()
    monkeypatch.setattr(of.room.bands[0].fairness, "dispatched", faulty)
    of.grant()
    assert of.charged() == 10 + 2 * 10
