"""How many replicas for prompts and how many for answers."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.core.domain import Learned, Role
from llmproxy.core.scaling.curve import StepCurve
from llmproxy.core.scaling.mix import Tokens
from llmproxy.core.scaling.need import Need, ReplicaFacts, replica_capacity
from llmproxy.core.scaling.roles import by_role


def need(of: float, prefill: float, decode: float) -> Need:
    return Need(round(of), of, "work", True, 3, {}, prefill, decode, None, 0, 0.0, 60.0)


def replica(role: str, up: bool = True) -> ReplicaFacts:
    return ReplicaFacts(up, 64, 200_000, 0.2, role=Role(role))


def replicas(**count: int) -> list[ReplicaFacts]:
    return [replica(role) for role, many in count.items() for _ in range(many)]


def found(of: Need, **count: int) -> dict[str, tuple[int, Any, int]]:
    roles = by_role(of, replicas(**count)).roles
    return {name: (one.desired, pytest.approx(one.need), one.up) for name, one in roles.items()}


def test_the_need_is_shared_out_by_the_work_of_prompts_and_of_answers() -> None:
    assert found(need(8.0, 1.5, 4.5), prefill=3, decode=5) == {"prefill": (2, 2.0, 3), "decode": (6, 6.0, 5)}


def test_backend_with_both_roles_counts_for_answers() -> None:
    assert found(need(4.0, 1.0, 1.0), prefill=1, decode=1, both=2)["decode"] == (2, 2.0, 3)


def test_unknown_work_keeps_the_present_roles() -> None:
    assert found(need(3.0, 0.0, 0.0), prefill=1, decode=2) == {"prefill": (1, 1.0, 1), "decode": (2, 2.0, 2)}


@pytest.mark.parametrize(("of", "prefill", "decode"), [(0.0, 0, 0), (4.5, 2, 3), (1.0, 1, 1)])
def test_need_without_known_work_is_shared_out_as_the_replicas_are(of: float, prefill: int, decode: int) -> None:
    """Zero if the pool is idle, and more than there are if all of them are full."""
    roles = by_role(need(of, 0.0, 0.0), replicas(prefill=1, decode=2)).roles
    assert (roles[Role.PREFILL].desired, roles[Role.DECODE].desired) == (prefill, decode)


def test_the_first_request_needs_a_replica_of_each_role() -> None:
    down = [replica(role, up=False) for role in (Role.PREFILL, Role.DECODE)]
    roles = by_role(need(1.0, 0.0, 0.0), down).roles
    assert {role: (one.desired, one.up) for role, one in roles.items()} == {Role.PREFILL: (1, 0), Role.DECODE: (1, 0)}


def test_each_role_is_rounded_up() -> None:
    assert found(need(0.5, 0.1, 0.4), prefill=1, decode=1) == {"prefill": (1, 0.1, 1), "decode": (1, 0.4, 1)}


def test_a_replica_that_is_down_is_not_up() -> None:
    down = [replica("prefill", up=False), *replicas(decode=1)]
    assert by_role(need(2.0, 1.0, 1.0), down).roles["prefill"].up == 0


def test_a_pool_without_roles_has_none() -> None:
    assert by_role(need(2.0, 1.0, 1.0), replicas(both=2)).roles == {}


def test_prompt_time_comes_from_the_backends_for_prompts() -> None:
    """Decode replicas compute no prompts, so their answers teach nothing about the time of a prompt token."""
    curve, learned = StepCurve(), Learned(0.03, 1e-4, 0.0, 0.01, 1e-4, 0.0, 1.0, 1.0, ())
    for sequences in (8.0, 32.0):
        curve.learn(100.0, 1.0 + sequences / 100.0, sequences, 0.0, 0.0)
    came = Tokens(10.0, 10_000.0, 10_000.0, 0.0, 1_000.0, 1_050.0)
    alone = replica_capacity(came, learned, curve, [replica("decode")], None, 1.0)
    apart = replica_capacity(came, learned, curve, replicas(prefill=1, decode=1), None, 1.0)
    assert alone is not None
    assert apart is not None
    assert apart.prompt_s == pytest.approx(0.1)
    assert alone.prompt_s < 0.05
