"""The states of an attempt follow each other in one order, and an answer that has begun stays begun."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llmproxy.core.domain import Outcome
from llmproxy.core.retry import Again, Cause
from llmproxy.scheduling.attempt import Attempt, AttemptState

State = AttemptState
HAPPY = {
    "an answer": (State.HEAD, State.STREAMING, State.DELIVERING, State.DONE),
    "a stream": (State.HEAD, State.HELD, State.STREAMING, State.DELIVERING, State.DONE),
    "a prefill": (State.HEAD, State.HELD, State.DONE),
    "no connection": (State.FAILED,),
    "an error answer": (State.HEAD, State.HELD, State.FAILED),
    "an error event in mid-stream": (State.HEAD, State.HELD, State.STREAMING, State.FAILED, State.DELIVERING),
    "a client that is slow to read it": (State.HEAD, State.STREAMING, State.FAILED, State.DELIVERING, State.FAILED),
}


@pytest.mark.parametrize("case", HAPPY)
def test_states_follow_each_other(case: str) -> None:
    attempt = Attempt()
    for before, state in pairwise((State.CONNECTING, *HAPPY[case])):
        assert attempt.state is before
        attempt.enter(state)
        assert state.name in repr(attempt)
    assert attempt.committed == (State.STREAMING in HAPPY[case])


@pytest.mark.parametrize(
    ("was", "state"),
    [
        (State.STREAMING, State.HELD),
        (State.HELD, State.HELD),
        (State.FAILED, State.STREAMING),
        (State.FAILED, State.HEAD),
        (State.DONE, State.FAILED),
        (State.DONE, State.DELIVERING),
    ],
)
def test_no_step_back(was: State, state: State) -> None:
    attempt = Attempt()
    attempt.enter(was)
    with pytest.raises(ValueError, match=f"{was.name} to {state.name}"):
        attempt.enter(state)
    assert attempt.state is was


@pytest.mark.parametrize("began", [False, True])
def test_only_an_attempt_without_an_answer_is_retried(began: bool) -> None:
    attempt = Attempt()
    if began:
        attempt.enter(State.STREAMING)
    attempt.fail(Outcome.CONNECT_FAILED, Cause.NO_CONNECTION, "no connection")
    assert (attempt.again is Again.NO) == began
    assert (attempt.state, attempt.committed) == (State.FAILED, began)


@pytest.mark.parametrize("cause", Cause)
def test_the_rest_of_an_answer_may_come_from_another_backend_unless_it_would_end_the_same_way(cause: Cause) -> None:
    attempt = Attempt()
    attempt.enter(State.STREAMING)
    attempt.fail(Outcome.BROKEN_STREAM, cause, "broken")
    before = {Cause.LACK, Cause.NO_CONNECTION, Cause.UNAUTHORIZED, Cause.NOT_SERVED, Cause.NOT_TRANSFERRED, Cause.LATE}
    ends = before | {Cause.REJECTED, Cause.OVERRAN}
    assert attempt.again is (Again.NO if cause in ends else Again.REST)
