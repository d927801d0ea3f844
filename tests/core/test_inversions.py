"""Priority inversions: grants that a waiting request of a higher band could have used. A correct scheduler has none."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, AdmissionKind, Grant, Request, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.placement import first_fit
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import UsageLimit
from tests.core.make import grants, listing, pools, request, submit, tight
from tests.dispatching import Client, dispatcher, turns


@pytest.fixture
def upside_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that serves the lowest band first."""

    class Broken(WaitingRoom):
        @property
        def order(self) -> list[int]:
            return sorted(self.bands)

        @order.setter
        def order(self, levels: list[int]) -> None:
            del levels

    monkeypatch.setattr("llmproxy.core.scheduler.WaitingRoom", Broken)


@pytest.mark.usefixtures("upside_down")
async def test_the_dispatcher_counts_them() -> None:
    one = dispatcher(None, tight(ceilings={SHEDDABLE: 1.0}, headroom_s=0.0), a=1)
    clients = [Client(one, band=band) for band in (DEFAULT, CRITICAL, SHEDDABLE)]
    await turns()
    assert (clients[0].holds(), one.inversions) == ("a", 0)
    await clients[0].done()
    await turns()
    assert (clients[2].holds(), one.inversions) == ("a", 1)
    for client in reversed(clients):
        await client.done()


def by_band(found: list[Grant]) -> list[tuple[int, bool]]:
    return [(grant.request.band, grant.why.inverted) for grant in found]


@pytest.mark.usefixtures("upside_down")
def test_a_scheduler_that_takes_the_lowest_band_first_inverts() -> None:
    one = pools({"a": 3}, tight(ceilings={SHEDDABLE: 1.0}, headroom_s=0.0))
    submit(one, *(request(band=band) for band in (CRITICAL, DEFAULT, SHEDDABLE)))
    assert by_band(grants(one)) == [(SHEDDABLE, True), (DEFAULT, True), (CRITICAL, False)]


def test_the_highest_band_goes_first_and_nothing_is_inverted() -> None:
    one = pools({"a": 3}, tight(ceilings={SHEDDABLE: 1.0}, headroom_s=0.0))
    submit(one, *(request(band=band) for band in (SHEDDABLE, DEFAULT, CRITICAL)))
    assert by_band(grants(one)) == [(CRITICAL, False), (DEFAULT, False), (SHEDDABLE, False)]


@pytest.mark.usefixtures("upside_down")
@pytest.mark.parametrize(
    "high",
    [
        {"adapter": "elsewhere"},
        {"prompt_tokens": 5_000},
        {"backend": "b"},
        {"limits": ("tenant:full",)},
    ],
    ids=["its adapter is not there", "its prompt is too long", "it may go to another alone", "its limit is used up"],
)
def test_request_that_could_not_use_the_backend_is_not_passed_over(high: dict[str, Any]) -> None:
    settings = tight(ceilings={SHEDDABLE: 1.0}, headroom_s=0.0, limits={"tenant:full": UsageLimit(in_flight=1)})
    one = pools({"a": 2, "b": 1}, settings, listings={"b": listing("elsewhere", max_model_len=8_192)})
    submit(one, request(limits=("tenant:full",), backend="b"))
    grants(one)
    submit(one, request(band=DEFAULT, backend="a"), request(band=CRITICAL, **high))
    assert (DEFAULT, False) in by_band(grants(one))


@pytest.mark.usefixtures("upside_down")
def test_a_backend_that_failed_a_request_may_be_given_to_a_lower_band() -> None:
    one = pools({"a": 1, "b": 1}, tight(ceilings={SHEDDABLE: 1.0}, headroom_s=0.0))
    submit(one, request(band=CRITICAL), request(band=CRITICAL))
    first, other = grants(one)
    one.apply(Returned(first.lease, Verdict.FAILED), 0.0)
    one.submit(first.request, 0.0, frozenset({first.placed.backend}), AdmissionKind.RETRY)
    submit(one, request(band=DEFAULT))
    assert by_band(grants(one)) == [(DEFAULT, False)]
    one.apply(Returned(other.lease, Verdict.SERVED), 0.0)
    submit(one, request(band=DEFAULT))
    assert by_band(grants(one)) == [(DEFAULT, True)], "the other backend has not failed it"


def test_a_minimum_share_inverts_nothing() -> None:
    one = pools({"a": 1}, tight(min_shares={SHEDDABLE: 0.5}))
    submit(one, *(request(band=band) for band in (CRITICAL, SHEDDABLE) for _ in range(3)))
    seen = []
    for _ in range(6):
        (grant,) = grants(one)
        seen.append((grant.request.band, grant.why.guaranteed, grant.why.inverted))
        one.apply(Returned(grant.lease, Verdict.SERVED), 0.0)
    assert (SHEDDABLE, True, False) in seen
    assert not any(inverted for _, _, inverted in seen)


@pytest.mark.usefixtures("upside_down")
def test_no_more_requests_are_looked_at_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Request] = []

    def could_serve(asked: Request, *_: object) -> bool:
        looks.append(asked)
        return False

    monkeypatch.setattr(first_fit, "could_serve", could_serve)
    one = pools({"a": 4}, tight(ceilings={SHEDDABLE: 1.0}, headroom_s=0.0))
    submit(one, *(request(band=CRITICAL, flow=f"f{i % 50}") for i in range(500)), request(band=DEFAULT))
    assert grants(one)[0].request.band == DEFAULT
    assert len(looks) == first_fit.INVERSION_LOOK_MAX


def waits(of: Pools, now: float) -> dict[int, float]:
    of.check(now)
    return of.longest_s(now)


def test_longest_wait_belongs_to_the_first_waiting_request() -> None:
    one = pools({"a": 1}, tight())
    one.submit(request(id="running"), 0.0)
    (running,) = grants(one)
    assert waits(one, 1.0) == {}
    asked = {at: request(id=str(at), band=band) for at, band in ((1, DEFAULT), (2, DEFAULT), (3, CRITICAL))}
    for at, each in asked.items():
        one.submit(each, float(at))
    assert waits(one, 5.0) == {DEFAULT: 4.0, CRITICAL: 2.0}
    one.cancel(asked[1])
    assert waits(one, 5.0) == {DEFAULT: 3.0, CRITICAL: 2.0}
    one.apply(Returned(running.lease, Verdict.FAILED), 6.0)
    one.submit(running.request, 6.0, entry=AdmissionKind.RETRY)
    one.cancel(asked[2])
    assert waits(one, 7.0)[DEFAULT] == 1.0, "who came back waits since then"
