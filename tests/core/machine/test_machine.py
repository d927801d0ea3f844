"""The scheduler against every order of events that Hypothesis can think of, in worlds of unequal backends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from llmproxy.core import scheduling_pass
from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import Listing, ModelCard, NoCapacity, Reading, Request, Trouble, Verdict
from llmproxy.core.placement.policy import presets
from llmproxy.core.queueing import queue
from llmproxy.core.queueing.fairness import fcfs, policies
from llmproxy.core.queueing.ordering import orderings
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.scheduler import Scheduler
from llmproxy.core.scheduling_pass import Pass
from tests import ROOT
from tests.core.machine import fleets
from tests.core.machine.random_events import random_walk
from tests.core.machine.world import World
from tests.core.make import listing
from tests.sizes import examples

LISTINGS = (
    listing("x"),
    listing("y", max_model_len=100),
    listing(base="other"),
    Listing(0.0, (ModelCard("base", None, 500), ModelCard("spare", None, 500))),
)


class Machine(RuleBasedStateMachine):
    """Draws events. `World` carries them out and checks the promises after every pass."""

    own_checks = True
    only_ceilings: Mapping[int, float] | None = None
    only_fleet: Mapping[str, tuple[int | None, Listing]] | None = None

    def __init__(self) -> None:
        super().__init__()
        # A small cap, so that capped passes are met too.
        self._capped = patch.object(scheduling_pass, "PASS_MAX", 4)
        self._capped.start()

    @initialize(
        fleet=st.sampled_from(fleets.FLEETS),
        fairness=st.sampled_from(sorted(policies.names())),
        placement=st.sampled_from(sorted(presets.names())),
        ceilings=st.sampled_from(fleets.CEILINGS),
        ordering=st.sampled_from(sorted(orderings.names())),
        limits=st.sampled_from(({}, fleets.LIMITS)),
        min_shares=st.sampled_from(fleets.MIN_SHARES),
        preemption=st.booleans(),
        no_backend_wait_s=st.sampled_from((0.0, 2.0, 30.0)),
        prompt_window_s=st.sampled_from((None, 0.02)),
    )
    def build(self, fleet: Any, ceilings: Any, **given: Any) -> None:
        settings = fleets.settings(ceilings=self.only_ceilings or ceilings, **given)
        self.world = World(self.only_fleet or fleet, settings, own_checks=self.own_checks)

    # --- clients -------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        times=st.integers(1, 6),
        band=st.sampled_from(fleets.BANDS),
        flow=st.sampled_from(fleets.FLOWS),
        prompt_tokens=st.sampled_from((5, 50, 150, 800)),
        max_tokens=st.sampled_from((1, 40, 400)),
        sequences=st.sampled_from((1, 1, 1, 5)),
        max_wait_s=st.sampled_from((0.5, 3.0, 1e3)),
        slo=st.sampled_from(fleets.SLOS),
        limits=st.sampled_from(fleets.LIMITED_BY),
        session=st.sampled_from((None, "s", "t")),
        prefix=st.sampled_from(fleets.PREFIXES),
        backend=st.sampled_from(fleets.BOUND_TO),
    )
    def submit(self, data: st.DataObject, times: int, band: int, flow: str, max_wait_s: float, **given: Any) -> None:
        if not self.world.settings.limits:
            given["limits"] = ()
        pools = [name for name in self.world.pools.catalogue.pools if name in fleets.ADAPTERS]
        if pools:
            pool = data.draw(st.sampled_from(pools))
            adapter = data.draw(st.sampled_from(fleets.ADAPTERS[pool]))
            for _ in range(times):
                self.world.submit(pool, adapter, band, flow, max_wait_s, prefix_tokens=16.0, **given)

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(list(self.world.waiting))))

    @rule()
    def decide(self) -> None:
        self.world.decide()

    # --- leases --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.held)
    @rule(data=st.data(), tokens=st.sampled_from((0, 10, 900)))
    def speak(self, data: st.DataObject, tokens: int) -> None:
        lease = data.draw(st.sampled_from(list(self.world.held)))
        self.world.started(lease)
        self.world.progress(lease, tokens)

    @precondition(lambda self: self.world.held)
    @rule(
        data=st.data(),
        verdict=st.sampled_from(Verdict),
        tokens=st.sampled_from((None, 0, 10, 900)),
        retry=st.booleans(),
        at_once=st.booleans(),
    )
    def finish(self, data: st.DataObject, verdict: Verdict, tokens: int | None, retry: bool, at_once: bool) -> None:
        self.world.finish(data.draw(st.sampled_from(list(self.world.held))), verdict, tokens, retry)
        if at_once:
            self.world.decide()

    @precondition(lambda self: any(held.taken_back for held in self.world.held.values()))
    @rule(at_once=st.booleans())
    def give_back(self, at_once: bool) -> None:
        for lease in [lease for lease, held in self.world.held.items() if held.taken_back]:
            self.world.finish(lease, Verdict.PREEMPTED, None, retry=False)
            if at_once:
                self.world.decide()

    # --- polls, honest or not ------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        age_s=st.sampled_from((0.0, 0.01, 2.0, 6.0)),
        running=st.integers(0, 9),
        waiting=st.sampled_from((0, 0, 3)),
        kv_used=st.sampled_from((None, 0.0, 0.6, 0.9, 1.0)),
        kv_tokens=st.sampled_from((None, 0, 500, 5000)),
        running_adapters=st.frozensets(st.sampled_from(("x", "y", "z"))),
        max_adapters=st.sampled_from((None, 1, 2)),
    )
    def observe(self, data: st.DataObject, age_s: float, **numbers: Any) -> None:
        backend = data.draw(st.sampled_from(list(self.world.pools.backends)))
        self.world.observe(backend, Reading(taken_at_s=self.world.now - age_s, **numbers))

    @rule(data=st.data(), trouble=st.sampled_from(Trouble), times=st.integers(1, 2))
    def trouble(self, data: st.DataObject, trouble: Trouble, times: int) -> None:
        backend = data.draw(st.sampled_from(list(self.world.pools.backends)))
        for _ in range(times):
            self.world.troubled(backend, trouble)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.world.answered(data.draw(st.sampled_from(list(self.world.pools.backends))))

    @rule(data=st.data(), changed=st.booleans())
    def relist(self, data: st.DataObject, changed: bool) -> None:
        backend = data.draw(st.sampled_from(list(self.world.pools.backends)))
        self.world.listed(backend, data.draw(st.sampled_from(LISTINGS)) if changed else self.world.fleet[backend][1])

    # --- operators -----------------------------------------------------------------------------------------------

    @rule(data=st.data(), drained=st.booleans())
    def drain(self, data: st.DataObject, drained: bool) -> None:
        self.world.drain(data.draw(st.sampled_from(list(self.world.pools.backends))), drained)

    @rule(data=st.data())
    def leave_or_come(self, data: st.DataObject) -> None:
        self.world.leave_or_come(data.draw(st.sampled_from(list(self.world.fleet))))

    @rule(seconds=st.sampled_from((0.01, 0.3, 1.0, 5.0)))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    # --- promises ------------------------------------------------------------------------------------------------

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and hasattr(self, "world"):
                self.world.wind_down()
        finally:
            self._capped.stop()


# Hypothesis also draws constants of the modules that are loaded, so that a run of this file alone has other examples
# than a run of all tests. Phase.explain would trace every pass, which takes minutes.
EXAMPLES = hypothesis.settings(
    phases=(Phase.generate, Phase.shrink),
    max_examples=int(os.environ.get("LLMPROXY_TEST_EXAMPLES") or examples(150)),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
# The rarest mutant takes from 10 to 1,700 examples. They differ with the modules that are loaded.
UNTIL_IT_FAILS = hypothesis.settings(
    EXAMPLES, max_examples=10_000, phases=(Phase.generate,), report_multiple_bugs=False
)


# Hypothesis shrinks a failing example for at most 300 s.
@pytest.mark.hypothesis
@pytest.mark.timeout(420)
def test_every_promise_holds_in_any_order_of_events() -> None:
    run_state_machine_as_test(Machine, settings=EXAMPLES)


# --- the net has no holes: each of these bugs is caught ---------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch], None]


def blocked_band_lets_the_lower_one_go_on(patching: pytest.MonkeyPatch) -> None:
    strict = Pass._grant_one

    def lax(self: Pass, *arguments: Any, **more: Any) -> Any:
        granted = strict(self, *arguments, **more)
        return None if isinstance(granted, NoCapacity) else granted

    patching.setattr(Pass, "_grant_one", lax)
    # While ceilings fall with priority, the band below finds no room either; here it would.
    patching.setattr(Machine, "only_ceilings", fleets.RISING_CEILINGS)
    # And on a batch of some size it has room for long.
    patching.setattr(Machine, "only_fleet", {"a": (8, listing("x", max_model_len=1000))})


def low_bands_go_first(patching: pytest.MonkeyPatch) -> None:
    make = WaitingRoom.make_band

    def upside_down(self: WaitingRoom, level: int) -> Any:
        band = make(self, level)
        self.order.sort()
        return band

    patching.setattr(WaitingRoom, "make_band", upside_down)


def only_heads_are_looked_at(patching: pytest.MonkeyPatch) -> None:
    patching.setattr(queue, "FLOW_LOOK_MAX", 1)


def ceilings_are_ignored(patching: pytest.MonkeyPatch) -> None:
    patching.setattr("llmproxy.core.settings.Settings.ceiling", lambda *_: 1.0)


def debit_is_skipped(patching: pytest.MonkeyPatch) -> None:
    book = Backend.book

    def forgetful(self: Backend, lease: int, request: Request, now: float, cached_tokens: int) -> None:
        book(self, lease, request, now, cached_tokens)
        self._own.sequences -= request.sequences

    patching.setattr(Backend, "book", forgetful)


def release_is_forgotten(patching: pytest.MonkeyPatch) -> None:
    release = Backend.release

    def forgetful(self: Backend, lease: int, verdict: Verdict, now: float, *, excused: bool = False) -> None:
        if verdict is not Verdict.CLIENT_GONE:
            release(self, lease, verdict, now, excused=excused)

    patching.setattr(Backend, "release", forgetful)


def deadline_is_missed(patching: pytest.MonkeyPatch) -> None:
    patching.setattr(Scheduler, "_expired", lambda *_: [])


def exclusion_is_forgotten(patching: pytest.MonkeyPatch) -> None:
    submit = Scheduler.submit
    patching.setattr(Scheduler, "submit", lambda self, *given: submit(self, given[0], given[1], frozenset(), given[3]))


def own_backend_is_forgotten(patching: pytest.MonkeyPatch) -> None:
    submit = Scheduler.submit
    patching.setattr(
        Scheduler, "submit", lambda self, one, *given: submit(self, structs.replace(one, backend=None), *given)
    )


def flow_is_offered_twice(patching: pytest.MonkeyPatch) -> None:
    once = fcfs.FcfsFairness.candidates

    def twice(self: fcfs.FcfsFairness, now: float) -> Iterator[str]:
        flows = list(once(self, now))
        return iter(flows + flows[:1])

    patching.setattr(fcfs.FcfsFairness, "candidates", twice)


# The rarest of them is found after a minute of work, which a busy machine may stretch.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutation",
    [
        blocked_band_lets_the_lower_one_go_on,
        low_bands_go_first,
        only_heads_are_looked_at,
        ceilings_are_ignored,
        debit_is_skipped,
        release_is_forgotten,
        deadline_is_missed,
        exclusion_is_forgotten,
        own_backend_is_forgotten,
    ],
)
def test_a_mutant_is_caught_by_the_independent_account(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    # The scheduler's own check() is off here: what catches the mutant is the second account alone.
    monkeypatch.setattr(Machine, "own_checks", False)
    mutation(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Machine, settings=UNTIL_IT_FAILS)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [flow_is_offered_twice, debit_is_skipped])
def test_a_mutant_is_caught_by_the_schedulers_own_check(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=UNTIL_IT_FAILS)


# --- same seed, same trace --------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [*range(8), 102, 156, 288])
def test_a_random_walk_keeps_every_promise_and_drains(seed: int) -> None:
    world = random_walk(seed, 300)
    assert len(world.ended) > 50
    world.wind_down()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_decided_does_not_depend_on_where_the_clock_began(seed: int) -> None:
    def grants(world: World) -> list[str]:
        # Up to the first time in them.
        return [line.split("arrived_s")[0] for line in world.trace if line.startswith("Grant")]

    one, other = random_walk(seed, 250), random_walk(seed, 250, begins_s=4096.0)
    assert grants(one) == grants(other)
    assert one.ended == other.ended


@pytest.mark.slow
def test_one_seed_gives_one_trace_under_any_hash_seed() -> None:
    def trace(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tests.core.machine.random_events"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        )
        return done.stdout

    first = trace("1")
    assert first.count("Grant(") > 100
    assert trace("2") == first
    assert trace("77") == first
