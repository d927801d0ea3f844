"""Random sequences of events over split requests: priority, shares, limits and counts hold across both stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from msgspec import structs

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Drop,
    Grant,
    Preempt,
    Refused,
    Request,
    Revoke,
    Role,
    Stage,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.settings import Disaggregation, Splitting, UsageLimit
from tests.core.make import DEFAULTS
from tests.core.test_stages import ALWAYS, long, split_up

FLEETS = (
    {"p": (Role.PREFILL, 2), "d": (Role.DECODE, 3)},
    {"p": (Role.PREFILL, 1), "q": (Role.PREFILL, 2), "d": (Role.DECODE, 2), "e": (Role.DECODE, 2)},
    {"p": (Role.PREFILL, 2), "b": (Role.BOTH, 2), "d": (Role.DECODE, 1)},
)
BANDS = (CRITICAL, DEFAULT, SHEDDABLE)
IN_FLIGHT = 3
AGAIN = (Verdict.TRANSFER_FAILED, Verdict.FAILED, Verdict.CONNECT_FAILED)


@dataclass
class Walk:
    """A pool with roles, and a model of its waiting requests and leases that follows the events."""

    seed: int
    placement: str
    how: Disaggregation = ALWAYS
    now: float = 0.0
    waiting: dict[str, tuple[Request, frozenset[str]]] = field(default_factory=dict)
    held: dict[int, Grant] = field(default_factory=dict)
    computed: dict[str, Request] = field(default_factory=dict)
    originals: dict[str, Request] = field(default_factory=dict)
    stages: set[Stage] = field(default_factory=set)
    inversions: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.fleet = self.rng.choice(FLEETS)
        health = replace(
            DEFAULTS.health, failures_before_ejection=2, ejection_s=1.0, ejection_max_s=4.0, misses_before_down=2
        )
        limits = {"tenant:t": UsageLimit(in_flight=IN_FLIGHT)}
        self.pools = split_up(
            self.fleet, self.how, placement=self.placement, fairness="fair_share", health=health, limits=limits
        )

    def step(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.35:
            self.submit()
        elif kind < 0.80 and self.held:
            self.finish(rng.choice(list(self.held)), rng.choice((Verdict.SERVED,) * 4 + (*AGAIN, Verdict.CLIENT_GONE)))
        elif kind < 0.85 and self.computed:
            # The client leaves between the stages.
            self.end(self.computed.pop(rng.choice(list(self.computed))))
        elif kind < 0.95 and self.computed:
            self.go_on(rng.choice(list(self.computed)))
        elif 0.95 <= kind < 0.96:
            self.pools.troubled(rng.choice(list(self.fleet)), rng.choice((Trouble.REFUSED, Trouble.TIMEOUT)))
        else:
            self.now += rng.choice((0.1, 1.0, 5.0))
            for name in self.fleet:
                self.pools.backends[name].answered(self.now)
        self.decide()

    def submit(self) -> None:
        rng = self.rng
        made = long(
            id=f"r{len(self.originals)}", band=rng.choice(BANDS), flow=rng.choice("fg"), arrived_s=self.now,
            deadline_s=self.now + 1e6, splittable=rng.random() < 0.8, prompt_tokens=rng.choice((50, 2_000)),
            limits=rng.choice(((), ("tenant:t",))), stream=rng.random() < 0.5,
        )  # fmt: skip
        self.originals[made.id] = made
        self.enter(made, frozenset(), AdmissionKind.NEW)

    def enter(self, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> None:
        try:
            self.pools.submit(request, self.now, excluded, entry)
        except Refused:
            self.end(request)
            return
        self.waiting[request.id] = request, excluded

    def finish(self, lease: int, verdict: Verdict) -> None:
        grant = self.held.pop(lease)
        request = self.originals[grant.request.id]
        if verdict is Verdict.SERVED:
            self.pools.apply(Started(grant.lease), self.now)
        usage = Usage(request.prompt_tokens, 5, 0) if verdict is Verdict.SERVED else None
        self.pools.apply(Returned(grant.lease, verdict, usage), self.now)
        if verdict is Verdict.SERVED and grant.request.stage is Stage.PREFILL:
            self.computed[request.id] = request
        elif verdict in AGAIN:
            again = structs.replace(request, splittable=request.splittable and self.rng.random() < 0.5)
            self.originals[request.id] = again
            self.enter(again, frozenset(), AdmissionKind.RETRY)
        else:
            self.end(request)

    def go_on(self, name: str) -> None:
        self.enter(self.computed.pop(name), frozenset(), AdmissionKind.PREFILLED)

    def end(self, request: Request) -> None:
        self.ended += 1
        self.pools.ended(request, None, self.now)

    def decide(self) -> None:
        again: list[tuple[Request, AdmissionKind]] = []
        for decision in self.pools.decide(self.now):
            request = decision.request
            match decision:
                case Grant():
                    self.granted(decision)
                case Drop():
                    del self.waiting[request.id]
                    self.end(request)
                case Preempt() | Revoke() if decision.lease in self.held:
                    grant = self.held.pop(decision.lease)
                    verdict = Verdict.PREEMPTED if isinstance(decision, Preempt) else Verdict.LOST
                    self.pools.apply(Returned(grant.lease, verdict), self.now)
                    entry = AdmissionKind.PREEMPTED if isinstance(decision, Preempt) else AdmissionKind.RETRY
                    again.append((self.originals[request.id], entry))
        for one, entry in again:
            self.enter(one, frozenset(), entry)
        self.check()

    def granted(self, grant: Grant) -> None:
        request, backend = grant.request, grant.placed.backend
        self.stages.add(request.stage)
        del self.waiting[request.id]
        self.held[grant.lease] = grant
        self.inversions += grant.why.inverted
        assert self.pools.backends[backend].view(self.now).load <= self.fleet[backend][1], "more than it runs"
        if request.stage is Stage.PREFILL:
            assert request.splittable
            assert grant.placed.answers_on not in (None, backend)
        if request.stage is not Stage.DECODE and self.how is ALWAYS and self.placement != "cost":
            # A higher band could have used the slot of a lower band. With prices, waiting may be better.
            above = [one for one, _ in self.waiting.values() if one.band > request.band and not self.limited(one)]
            assert not above, f"{request.id} went before {above[0].id}"

    def limited(self, request: Request) -> bool:
        return bool(request.limits) and self.in_flight() >= IN_FLIGHT

    def in_flight(self) -> int:
        """Requests of the tenant in flight, including requests between their stages."""
        running = [self.originals[grant.request.id] for grant in self.held.values()]
        between = [*self.computed.values()]
        between += [one for name, (one, _) in self.waiting.items() if name in self.pools_prefilled()]
        return sum(bool(one.limits) for one in running + between)

    def pools_prefilled(self) -> set[str]:
        return {one.id for scheduler in self.pools.schedulers.values() for one, _ in scheduler._prefilled}

    def check(self) -> None:
        self.pools.check(self.now)
        assert self.pools.limits.in_flight()["tenant:t"] == self.in_flight() <= IN_FLIGHT
        for name, backend in self.pools.backends.items():
            assert backend.own_in_flight == sum(grant.placed.backend == name for grant in self.held.values())

    def wind_down(self) -> None:
        """Ends all requests, and checks that no state remains."""
        for _ in range(400):
            self.now += 5.0
            for name in self.fleet:
                self.pools.backends[name].answered(self.now)
            for lease in list(self.held):
                self.finish(lease, Verdict.SERVED)
            for name in list(self.computed):
                self.go_on(name)
            self.decide()
            if not (self.held or self.computed or self.waiting):
                break
        assert [len(self.held), len(self.computed), len(self.waiting)] == [0, 0, 0], "something was never served"
        assert self.ended == len(self.originals)
        for backend in self.pools.backends.values():
            assert (backend.view(self.now).load, backend.reserved, backend.own_in_flight) == (0, 0, 0)
            assert backend.kv_pinned_until_s(self.now + 60.0) is None
        (scheduler,) = self.pools.schedulers.values()
        assert not scheduler._reservations.by_request
        assert not any((scheduler.charges._charges, scheduler.charges.between))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "how", [ALWAYS, DEFAULTS.disaggregation, Disaggregation(Splitting.TOKENS, 30.0, 1_000)], ids=str
)
@pytest.mark.parametrize("placement", ["cost", "least_request"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 115])
def test_every_promise_holds_across_both_stages(seed: int, placement: str, how: Disaggregation) -> None:
    walk = Walk(seed, placement, how)
    for _ in range(400):
        walk.step()
    assert walk.inversions == 0
    assert walk.ended > 20
    if how.splitting is not Splitting.AUTO:
        assert walk.stages == set(Stage)
    walk.wind_down()


def test_flows_share_by_weight_when_one_splits_and_the_other_does_not() -> None:
    one = split_up({"p": (Role.PREFILL, 2), "d": (Role.DECODE, 2)}, fairness="fair_share")
    served = {"split": 0.0, "whole": 0.0}
    for turn in range(400):
        for flow in served:
            one.submit(long(id=f"{flow}{turn}", flow=flow, splittable=flow == "split", deadline_s=1e9), float(turn))
        for _ in range(4):
            for grant in one.decide(float(turn)):
                assert isinstance(grant, Grant)
                usage = Usage(20_000, 100, 0)
                one.apply(Started(grant.lease), float(turn))
                one.apply(Returned(grant.lease, Verdict.SERVED, usage), float(turn))
                if grant.request.stage is Stage.PREFILL:
                    original = structs.replace(grant.request, stage=Stage.WHOLE, output_tokens=100, deadline_s=1e9)
                    one.submit(original, float(turn), frozenset(), AdmissionKind.PREFILLED)
                    continue
                served[grant.request.flow] += 20_200
                one.ended(grant.request, None, float(turn))
        if turn == 40:
            break
    assert served["split"] == pytest.approx(served["whole"], abs=4 * 20_200)
