"""Whether a failed attempt is the fault of the request or of the backend."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.core.backends.health import Ejected
from llmproxy.core.domain import AdmissionKind, Outcome, Verdict
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.pools import Pools
from tests.core.make import only_grant, pools, reading, refusal, request

FAILURES = 3


def attempt(of: Pools, backend: str, verdict: Verdict, name: str = "r", now: float = 1.0) -> None:
    """Runs an attempt of a request on `backend` that ends with `verdict`."""
    others = frozenset(of.backends) - {backend}
    of.submit(request(id=name, stream=True), now, others, AdmissionKind.RETRY)
    grant = only_grant(of, now)
    assert grant.placed.backend == backend
    if verdict is Verdict.SERVED:
        of.apply(Started(grant.lease), now)
    of.apply(Returned(grant.lease, verdict), now)


def ejections(of: Pools) -> list[Any]:
    return [event for event in of.take_health_events() if isinstance(event[1], Ejected)]


def test_the_same_failure_on_two_backends_is_the_request() -> None:
    of = pools(dict.fromkeys("abc"))
    for number in range(5 * FAILURES):
        attempt(of, "a", Verdict.FAILED, f"r{number}")
        attempt(of, "b", Verdict.FAILED, f"r{number}")
    assert not ejections(of)


def test_a_failure_on_one_backend_alone_is_the_backend() -> None:
    of = pools(dict.fromkeys("abc"))
    for number in range(FAILURES):
        attempt(of, "a", Verdict.FAILED, f"r{number}")
        attempt(of, "b", Verdict.SERVED, f"r{number}")
    assert [name for name, _ in ejections(of)] == ["a"]


def test_a_backend_that_refuses_is_to_blame_once_another_serves_the_request() -> None:
    of = pools(dict.fromkeys("abc"))
    attempt(of, "a", Verdict.UNAUTHORIZED)
    attempt(of, "b", Verdict.UNAUTHORIZED)
    assert not ejections(of)
    attempt(of, "c", Verdict.SERVED)
    # With three backends, one may be ejected.
    assert [name for name, _ in ejections(of)] == ["a"]


@pytest.mark.parametrize("running", [0, 1])
def test_a_backend_at_work_is_not_to_blame_for_a_long_prompt_which_is_not_computed_again(running: int) -> None:
    of = pools(dict.fromkeys("ab"))
    for number in range(FAILURES):
        of.backends["a"].observe(reading(1.0 + number, running=running))
        attempt(of, "a", Verdict.TIMED_OUT, f"r{number}", 1.0 + number)
    assert bool(ejections(of)) is not bool(running)
    again = request(id="r0", stream=True)
    if running:
        refused = refusal(of.submit, again, 9.0, frozenset("a"), AdmissionKind.RETRY)
        assert refused.outcome is Outcome.UPSTREAM_TIMEOUT
        of.ended(again, None, 9.0)
    of.submit(again, 9.0, frozenset("a"), AdmissionKind.RETRY)
