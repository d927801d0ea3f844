"""Split requests: prefill on one backend, and decode on another backend with a reserved slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Drop,
    Grant,
    Listing,
    ModelCard,
    Preempt,
    Request,
    Role,
    Stage,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Recomputing, Returned, Started
from llmproxy.core.placement.staged import FAILURES_MAX
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.settings import Disaggregation, Splitting, UsageLimit
from tests.core.conftest import Ledger
from tests.core.make import DEFAULTS, kill, listing, only_grant, pools, request, submit, tight

ALWAYS = Disaggregation(Splitting.ALWAYS, 30.0)
LISTING = listing(max_model_len=100_000)


def split_up(backends: dict[str, tuple[Role, int]], how: Disaggregation = ALWAYS, **given: Any) -> Pools:
    roles = {name: role for name, (role, _) in backends.items()}
    settings = tight(disaggregation=how, roles=roles, **given)
    return pools(
        {name: limit for name, (_, limit) in backends.items()}, settings, listings=dict.fromkeys(backends, LISTING)
    )


def one_each(how: Disaggregation = ALWAYS, limit: int = 2, **given: Any) -> Pools:
    return split_up({"p": (Role.PREFILL, limit), "d": (Role.DECODE, limit)}, how, **given)


def long(**given: Any) -> Request:
    return request(**({"prompt_tokens": 20_000, "output_tokens": 100, "splittable": True, "stream": True} | given))


def prefilled(of: Pools, grant: Grant, now: float = 1.0, excluded: frozenset[str] = frozenset()) -> list[Any]:
    """Ends a prefill stage; returns the decisions of the next pass."""
    of.apply(Started(grant.lease), now)
    of.apply(Returned(grant.lease, Verdict.SERVED, Usage(20_000, 1, 0)), now)
    original = structs.replace(grant.request, stage=Stage.WHOLE, output_tokens=100, deadline_s=now + 60.0)
    of.submit(original, now, excluded, AdmissionKind.PREFILLED)
    return of.decide(now)


def loads(of: Pools, now: float = 0.0) -> dict[str, int]:
    return {name: view.load for name, view in of.views(now).items()}


def test_the_prompt_goes_to_the_one_and_the_answer_to_the_other() -> None:
    one = one_each()
    submit(one, asked := long())
    grant = only_grant(one, 0.0)
    assert (grant.placed.backend, grant.placed.answers_on) == ("p", "d")
    assert grant.request.stage is Stage.PREFILL
    assert (grant.request.output_tokens, grant.request.max_tokens) == (1, 1)
    assert loads(one) == {"p": 1, "d": 1}
    (answer,) = prefilled(one, grant)
    assert isinstance(answer, Grant)
    assert (answer.placed.backend, answer.request.stage, answer.request.id) == ("d", Stage.DECODE, asked.id)
    assert loads(one, 1.0) == {"p": 0, "d": 1}
    one.apply(Returned(answer.lease, Verdict.SERVED, Usage(20_000, 100, 0)), 2.0)
    one.ended(asked, None, 2.0)
    assert loads(one, 2.0) == {"p": 0, "d": 0}
    one.check(2.0)


def test_a_request_that_cannot_be_split_goes_where_answers_go() -> None:
    one = one_each()
    submit(one, long(splittable=False))
    grant = only_grant(one, 0.0)
    assert (grant.placed.backend, grant.placed.answers_on) == ("d", None)


@pytest.mark.parametrize(("role", "splittable"), [(Role.BOTH, True), (Role.PREFILL, False)])
def test_a_pool_without_a_backend_for_answers_splits_nothing(role: Role, splittable: bool) -> None:
    one = split_up({"a": (role, 2), "b": (role, 2)})
    submit(one, long(splittable=splittable))
    assert only_grant(one, 0.0).request.stage is Stage.WHOLE


def test_never_splits_nothing() -> None:
    one = one_each(Disaggregation(Splitting.NEVER, 30.0))
    submit(one, long())
    assert only_grant(one, 0.0).placed.backend == "d"


def test_a_threshold_counts_the_tokens_that_no_answering_backend_has() -> None:
    one = one_each(Disaggregation(Splitting.TOKENS, 30.0, 1_000))
    submit(one, long(prompt_tokens=999), long(prompt_tokens=1_000))
    stages = [grant.request.stage for grant in one.decide(0.0) if isinstance(grant, Grant)]
    assert sorted(stages) == [Stage.PREFILL, Stage.WHOLE]


@pytest.mark.parametrize(("prompt_tokens", "stage"), [(30, Stage.WHOLE), (20_000, Stage.PREFILL)])
def test_auto_splits_only_prompts_that_would_delay_streams(prompt_tokens: int, stage: Stage) -> None:
    one = one_each(DEFAULTS.disaggregation, limit=20)
    for _ in range(8):
        submit(one, long(splittable=False, prompt_tokens=30, output_tokens=1_000))
        one.apply(Started(only_grant(one, 0.0).lease), 0.032)
    submit(one, long(prompt_tokens=prompt_tokens))
    assert only_grant(one, 1.0).request.stage is stage


def test_no_prompt_is_begun_without_a_place_for_its_answer() -> None:
    one = split_up({"p": (Role.PREFILL, 8), "d": (Role.DECODE, 2)})
    submit(one, *(long(band=CRITICAL) for _ in range(5)))
    first, second = one.decide(0.0)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert loads(one) == {"p": 2, "d": 2}
    # A released slot goes to a waiting request.
    one.apply(Returned(first.lease, Verdict.CLIENT_GONE), 1.0)
    assert [type(decision) for decision in one.decide(1.0)] == [Grant]
    assert loads(one, 1.0) == {"p": 2, "d": 2}


def test_the_answer_goes_before_all_that_waits() -> None:
    one = split_up({"p": (Role.PREFILL, 8), "d": (Role.DECODE, 1)})
    submit(one, asked := long(band=SHEDDABLE))
    grant = only_grant(one, 0.0)
    submit(one, long(band=CRITICAL), now=0.5)
    one.decide(0.5)
    (answer,) = (one for one in prefilled(one, grant) if isinstance(one, Grant))
    assert answer.request.id == asked.id


def test_a_request_between_its_stages_counts_once_under_limits_and_shares() -> None:
    limit = {"tenant:t": UsageLimit(in_flight=1)}
    one = one_each(limits=limit)
    submit(one, asked := long(limits=("tenant:t",)), long(limits=("tenant:t",)))
    grant = only_grant(one, 0.0)
    (answer,) = prefilled(one, grant)
    assert isinstance(answer, Grant)
    assert answer.request.id == asked.id
    assert one.snapshot(1.0).limits[0].in_flight == 1
    one.apply(Returned(answer.lease, Verdict.SERVED, Usage(20_000, 100, 0)), 2.0)
    one.ended(asked, None, 2.0)
    assert one.snapshot(2.0).limits[0].in_flight == 0
    assert only_grant(one, 2.0).request.id != asked.id


def test_both_stages_are_charged_as_much_as_the_whole() -> None:
    standings = []
    for how in (ALWAYS, Disaggregation(Splitting.NEVER, 30.0)):
        one = one_each(how, fairness="fair_share")
        # Another flow waits throughout, so that the counters are not reset.
        submit(one, long(flow="mine"))
        grant = only_grant(one, 0.0)
        usage = Usage(20_000, 100, 5_000)
        if how is ALWAYS:
            one.apply(Started(grant.lease), 1.0)
            one.apply(Returned(grant.lease, Verdict.SERVED, Usage(20_000, 1, 5_000)), 1.0)
            original = structs.replace(grant.request, stage=Stage.WHOLE, output_tokens=100)
            one.submit(original, 1.0, frozenset(), AdmissionKind.PREFILLED)
            grant = only_grant(one, 1.0)
        one.apply(Returned(grant.lease, Verdict.SERVED, usage), 2.0)
        standings.append(one.balances()["base", DEFAULT]["mine"])
    assert standings[0] == standings[1]
    assert standings[0] > 0.0


UNANSWERED: dict[str, tuple[Verdict, Usage | None]] = {
    "not arrived": (Verdict.TRANSFER_FAILED, Usage(0, 0)),
    "refused": (Verdict.SERVED, Usage(0, 0)),
    "lost": (Verdict.FAILED, None),
}


@pytest.mark.parametrize("unit", ["tokens", "requests"])
@pytest.mark.parametrize("case", [*UNANSWERED, "no place"])
@pytest.mark.parametrize("then", ["whole", "refused", "left"])
def test_a_prompt_is_paid_once_where_its_answer_failed(unit: str, case: str, then: str, ledger: type[Ledger]) -> None:
    costs = []
    for splits in (True, False):
        one = one_each(fairness_cost=unit)
        submit(one, asked := long(flow="mine", weight=2.0, splittable=splits))
        grant = only_grant(one, 1.0)
        if splits:
            if case == "no place":
                kill(one, "d")
            (answer,) = prefilled(one, grant) or one.decide(1.0)
            assert isinstance(answer, Grant)
            if case in UNANSWERED:
                verdict, usage = UNANSWERED[case]
                one.apply(Returned(answer.lease, verdict, usage), 1.0)
                one.submit(structs.replace(asked, splittable=False), 1.0, frozenset(), AdmissionKind.RETRY)
                answer = only_grant(one, 1.0)
            grant = answer
        assert grant.request.stage is Stage.WHOLE
        if then == "whole":
            one.apply(Returned(grant.lease, Verdict.SERVED, Usage(20_000, 100, 5_000)), 2.0)
        elif then == "refused":
            one.apply(Returned(grant.lease, Verdict.FAILED), 2.0)
        else:
            one.apply(Returned(grant.lease, Verdict.CLIENT_GONE, Usage(20_000, 3)), 2.0)
        one.ended(asked, None, 2.0)
        costs.append(ledger.last.charged)
    assert costs[0] == pytest.approx(costs[1])
    assert (costs[0] > 0.0) is (then != "refused")


@pytest.mark.parametrize("answer_ends", [False, True])
def test_a_prompt_without_an_answer_is_not_paid(answer_ends: bool, ledger: type[Ledger]) -> None:
    one = one_each()
    submit(one, asked := long(flow="mine"))
    grant = only_grant(one, 0.0)
    if answer_ends:
        (answer,) = prefilled(one, grant)
        one.apply(Returned(answer.lease, Verdict.TRANSFER_FAILED, Usage(0, 0)), 1.0)
    else:
        one.apply(Started(grant.lease), 1.0)
        one.apply(Returned(grant.lease, Verdict.SERVED, Usage(20_000, 1)), 1.0)
    one.ended(asked, None, 1.0)
    assert ledger.last.charged == 0.0


@pytest.mark.parametrize("unit", ["tokens", "requests"])
@pytest.mark.parametrize("way", ["split", "failed"])
def test_minimum_shares_count_a_prompt_once(unit: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    granted, undone = list[float](), list[float]()

    def note(_: MinShares, __: int, cost: float, ___: object) -> dict[int, float]:
        granted.append(cost)
        return {}

    monkeypatch.setattr(MinShares, "granted", note)
    monkeypatch.setattr(MinShares, "undone", lambda _, __, cost: undone.append(cost))
    one = one_each(min_shares={SHEDDABLE: 0.5}, fairness_cost=unit)
    submit(one, asked := long())
    (answer,) = prefilled(one, only_grant(one, 0.0))
    if way == "failed":
        one.apply(Returned(answer.lease, Verdict.TRANSFER_FAILED, Usage(0, 0)), 1.0)
        one.submit(structs.replace(asked, splittable=False), 1.0, frozenset(), AdmissionKind.RETRY)
        assert only_grant(one, 1.0).request.stage is Stage.WHOLE
    assert sum(granted) - sum(undone) == {"tokens": 20_200.0, "requests": 1.0}[unit]
    # The maximum credit is a multiple of the latest cost, so a grant without a cost would remove it.
    assert min(granted) > 0.0


def test_a_client_that_leaves_between_the_stages_leaves_nothing() -> None:
    one = one_each(limits={"tenant:t": UsageLimit(in_flight=1)})
    submit(one, asked := long(limits=("tenant:t",)))
    grant = only_grant(one, 0.0)
    one.apply(Started(grant.lease), 1.0)
    one.apply(Returned(grant.lease, Verdict.SERVED, Usage(20_000, 1)), 1.0)
    assert loads(one, 1.0) == {"p": 0, "d": 1}
    one.ended(asked, None, 1.0)
    assert loads(one, 1.0) == {"p": 0, "d": 0}
    assert one.snapshot(1.0).limits[0].in_flight == 0


@pytest.mark.parametrize("first_ends", [True, False])
def test_a_process_that_resumes_its_own_prompt_reserves_the_place_of_the_answer_once(first_ends: bool) -> None:
    of = one_each()
    submit(of, asked := long())
    first = only_grant(of, 0.0)
    gone = Returned(first.lease, Verdict.CLIENT_GONE)
    if first_ends:
        of.apply(gone, 0.1)
    again = of.resume(first.request, first.placed, 0.0)
    assert again is not None
    if not first_ends:
        of.apply(gone, 0.1)
    assert of.backends["d"].reserved == 1
    of.check(0.1)
    (answer,) = prefilled(of, structs.replace(first, lease=again))
    assert (answer.request.stage, of.backends["d"].reserved) == (Stage.DECODE, 0)
    of.apply(Returned(answer.lease, Verdict.SERVED, Usage(20_000, 100, 0)), 2.0)
    of.ended(asked, None, 2.0)
    of.check(2.0)


def test_a_pool_that_is_split_during_a_prompt_keeps_no_place_for_the_answer() -> None:
    here, both, there = (Listing(0.0, tuple(ModelCard(x, None, 100_000) for x in names)) for names in ("m", "mn", "n"))
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    settings = tight(disaggregation=ALWAYS, roles=roles)
    of = pools(dict.fromkeys("pdxyz", 4), settings, listings={"p": both, "d": both} | dict.fromkeys("xyz", there))
    submit(of, asked := long(model="m", pool=of.pool_of("p")))
    grant = only_grant(of, 0.0)
    for backend in "pd":
        of.listed(backend, here)
    assert of.pool_of("d") != of.pool_of("x")
    (answer,) = prefilled(of, grant)
    of.apply(Started(answer.lease), 2.0)
    of.apply(Returned(answer.lease, Verdict.SERVED, Usage(20_000, 100, 0)), 2.0)
    of.ended(asked, True, 2.0)
    assert of.backends["d"].reserved == 0


def test_a_refused_prompt_keeps_nothing() -> None:
    """A refusal by the engine counts as served, and no answer follows."""
    one = one_each(limits={"tenant:t": UsageLimit(in_flight=1)}, limit=1)
    submit(one, asked := long(limits=("tenant:t",)))
    one.apply(Returned(only_grant(one, 0.0).lease, Verdict.SERVED, Usage(0, 0)), 1.0)
    assert loads(one, 1.0) == {"p": 0, "d": 0}
    assert one.backends["p"].kv_pinned_until_s(1.0) is None
    one.submit(structs.replace(asked, splittable=False), 1.0, frozenset(), AdmissionKind.RETRY)
    assert only_grant(one, 1.0).placed.backend == "d"


@pytest.mark.parametrize("refused", [False, True])
def test_only_an_answer_that_began_proves_that_prompts_arrive(refused: bool) -> None:
    """Two requests fail, the third is refused or starts, and another fails: three consecutive failures or not."""
    one = one_each()
    for turn, verdict in enumerate((*[Verdict.TRANSFER_FAILED] * 2, Verdict.SERVED, Verdict.TRANSFER_FAILED)):
        submit(one, asked := long(), now=float(turn))
        (answer,) = prefilled(one, only_grant(one, float(turn)), float(turn))
        if verdict is Verdict.SERVED and not refused:
            one.apply(Started(answer.lease), float(turn))
        one.apply(Returned(answer.lease, verdict, Usage(0, 0)), float(turn))
        one.ended(asked, None, float(turn))
    submit(one, long(), now=3.0)
    assert only_grant(one, 3.0).request.stage is (Stage.WHOLE if refused else Stage.PREFILL)


def test_a_prompt_that_is_not_fetched_proves_nothing() -> None:
    """Between failures it neither resets nor increases their count."""
    one = one_each()
    for turn, late in enumerate((*[False] * (FAILURES_MAX - 1), True, False)):
        submit(one, asked := long(), now=float(turn))
        grant = only_grant(one, float(turn))
        # Otherwise the first request below would find the backend idle and be served whole.
        assert grant.request.stage is Stage.PREFILL
        (answer,) = prefilled(one, grant, float(turn))
        if late:
            placement = next(iter(one.schedulers.values()))._placement
            told: list[int] = []
            placement.inner.recomputing = told.append  # type: ignore[assignment, method-assign]
            one.apply(Recomputing(answer.lease), float(turn))
            assert told == [answer.lease]
            assert one.backends["p"].kv_pinned_until_s(float(turn)) is None
            one.apply(Started(answer.lease), float(turn))
        one.apply(Returned(answer.lease, Verdict.SERVED if late else Verdict.TRANSFER_FAILED, Usage(0, 0)), float(turn))
        one.ended(asked, None, float(turn))
    submit(one, long(), now=4.0)
    assert only_grant(one, 4.0).request.stage is Stage.WHOLE


def fail_a_transfer(of: Pools, now: float) -> None:
    """Split a request whose answer cannot fetch the prompt."""
    submit(of, asked := long(arrived_s=now, deadline_s=now + 60.0), now=now)
    (answer,) = prefilled(of, only_grant(of, now), now)
    of.apply(Returned(answer.lease, Verdict.TRANSFER_FAILED, Usage(0, 0)), now)
    of.ended(asked, None, now)


def splits(of: Pools, now: float) -> bool:
    """Whether the next request is split. Its client leaves."""
    submit(of, asked := long(arrived_s=now, deadline_s=now + 60.0), now=now)
    grant = only_grant(of, now)
    of.apply(Returned(grant.lease, Verdict.CLIENT_GONE), now)
    of.ended(asked, None, now)
    return grant.request.stage is Stage.PREFILL


def test_each_further_failure_doubles_the_pause() -> None:
    one, now, pauses = one_each(), 0.0, list[float]()
    for failures in range(1, FAILURES_MAX + 6):
        fail_a_transfer(one, now)
        failed_s = now
        while not splits(one, now):
            now += 0.5
        if failures >= FAILURES_MAX:
            pauses.append(now - failed_s)
        else:
            assert now == failed_s
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_new_process_for_prompts_starts_without_failures() -> None:
    one = one_each()
    for _ in range(FAILURES_MAX):
        fail_a_transfer(one, 0.0)
    assert not splits(one, 1.0)
    one.replace_process("p")
    one.backends["p"].answered(1.0)
    for _ in range(FAILURES_MAX - 1):
        fail_a_transfer(one, 1.0)
    assert splits(one, 1.0)


def test_a_waiting_answer_can_be_cancelled() -> None:
    one = one_each()
    submit(one, asked := long())
    grant = only_grant(one, 0.0)
    one.apply(Started(grant.lease), 1.0)
    one.apply(Returned(grant.lease, Verdict.SERVED, Usage(20_000, 1)), 1.0)
    one.submit(asked, 1.0, frozenset(), AdmissionKind.PREFILLED)
    one.cancel(asked)
    one.ended(asked, None, 1.0)
    assert one.decide(1.0) == []
    assert loads(one, 1.0) == {"p": 0, "d": 0}


def test_lost_reservation_is_replaced() -> None:
    one = split_up({"p": (Role.PREFILL, 2), "d": (Role.DECODE, 2), "e": (Role.DECODE, 2)})
    submit(one, long())
    grant = only_grant(one, 0.0)
    kept = grant.placed.answers_on
    assert kept is not None
    kill(one, kept)
    (answer,) = prefilled(one, grant)
    assert isinstance(answer, Grant)
    assert {answer.placed.backend, kept} == {"d", "e"}


def test_request_is_served_whole_where_no_place_is_left() -> None:
    one = split_up({"p": (Role.PREFILL, 2), "d": (Role.DECODE, 2)})
    submit(one, asked := long())
    grant = only_grant(one, 0.0)
    kill(one, "d")
    found = prefilled(one, grant)
    # Engines enforce no role, so the only remaining backend serves the whole request.
    (again,) = found or one.decide(1.0)
    assert isinstance(again, Grant)
    assert (again.placed.backend, again.request.stage, again.request.id) == ("p", Stage.WHOLE, asked.id)
    one.apply(Returned(again.lease, Verdict.SERVED), 2.0)
    one.ended(asked, None, 2.0)
    assert loads(one, 2.0)["p"] == 0


@pytest.mark.parametrize("part", ["place", "begin"])
def test_a_fault_of_a_placement_loses_no_request_between_its_stages(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    one = one_each(limit=4)
    submit(one, long(), long())
    prompts = [grant for grant in one.decide(0.0) if isinstance(grant, Grant)]
    (scheduler,) = one.schedulers.values()

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(scheduler._placement.inner if part == "place" else scheduler._placement, part, fails)
        assert [decided for grant in prompts for decided in prefilled(one, grant)] == []
    assert [type(fault) for fault, _ in one.faults.take(1.0)] == [ZeroDivisionError]
    served = {grant.request.id for now in (2.5, 3.5) for grant in one.decide(now)}
    assert served == {grant.request.id for grant in prompts}


def test_request_is_dropped_where_no_backend_is_left() -> None:
    one = one_each(queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0))
    submit(one, long())
    grant = only_grant(one, 0.0)
    kill(one, "d")
    kill(one, "p")
    found = [x for x in prefilled(one, grant) if isinstance(x, Drop)]
    assert len(found) == 1


def test_an_answer_never_goes_to_the_backend_of_its_prompt() -> None:
    one = split_up({"a": (Role.BOTH, 4), "d": (Role.DECODE, 1)})
    submit(one, long(splittable=False))
    whole = only_grant(one, 0.0)
    submit(one, long())
    grant = only_grant(one, 0.0)
    assert {whole.placed.backend, grant.placed.backend} <= {"a", "d"}
    if grant.request.stage is Stage.PREFILL:
        assert grant.placed.backend != grant.placed.answers_on
        (answer,) = prefilled(one, grant)
        assert isinstance(answer, Grant)
        assert answer.placed.backend != grant.placed.backend


@pytest.mark.parametrize("splittable", [True, False])
def test_backends_for_prompts_serve_adapters_that_no_other_backend_has(splittable: bool) -> None:
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    listings = {"p": listing("lora", max_model_len=100_000), "d": LISTING}
    one = pools({"p": 2, "d": 2}, tight(disaggregation=ALWAYS, roles=roles), listings=listings)
    submit(one, long(model="lora", adapter="lora", splittable=splittable), long())
    grants = [grant for grant in one.decide(0.0) if isinstance(grant, Grant)]
    assert [(grant.request.model, grant.request.stage, grant.placed.answers_on) for grant in grants] == [
        ("lora", Stage.WHOLE, None),
        (grants[1].request.model, Stage.PREFILL, "d"),
    ]
    assert grants[0].placed.backend == "p"


def test_a_prompt_is_preempted_for_the_place_of_its_answer_and_an_answer_never() -> None:
    one = split_up({"p": (Role.PREFILL, 8), "d": (Role.DECODE, 2)})
    submit(one, long(band=SHEDDABLE, id="first"))
    first = only_grant(one, 0.0)
    (answer,) = prefilled(one, first)
    assert isinstance(answer, Grant)
    submit(one, long(band=SHEDDABLE, id="second"), now=1.0)
    second = only_grant(one, 1.0)
    submit(one, long(band=CRITICAL, splittable=False), now=1.0)
    (decision,) = one.decide(1.0)
    assert isinstance(decision, Preempt)
    assert decision.lease == second.lease
    one.apply(Returned(second.lease, Verdict.PREEMPTED), 1.0)
    urgent = only_grant(one, 1.0)
    assert (urgent.request.band, urgent.placed.backend) == (CRITICAL, "d")
    # The decode stage has the other slot and keeps it.
    submit(one, long(band=CRITICAL, splittable=False), now=1.0)
    assert one.decide(1.0) == []


def test_a_failed_transfer_is_no_failure_of_the_backend() -> None:
    one = one_each(health=DEFAULTS.health)
    for turn in range(20):
        submit(one, asked := long(), now=float(turn))
        (answer,) = prefilled(one, only_grant(one, float(turn)), float(turn))
        assert isinstance(answer, Grant)
        one.apply(Returned(answer.lease, Verdict.TRANSFER_FAILED), float(turn))
        one.ended(asked, None, float(turn))
    assert one.backends["d"].health.available(20.0)
