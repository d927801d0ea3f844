"""What the placement that prices in seconds learns from what became of its choices, and what it forgets."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from llmproxy.core.domain import Usage, Verdict
from llmproxy.core.placement.backend_load import WORK_S
from llmproxy.core.placement.cost import STREAM
from tests.core.cost_bench import BASE_S, BOTH, STEP_S, TOKEN_S, Stand, chain, streamed
from tests.core.make import view

# --- how fast backends are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slower", [2.0, 2.9])
def test_a_slower_backend_is_known_after_ten_prompts(slower: float) -> None:
    stand, views = Stand(), [view("fast", load=3), view("slow")]
    asked = streamed(prompt_tokens=1_000)
    assert stand.place(asked, views).backend == "slow"
    for _ in range(10):
        stand.teach("fast", 1)
        stand.teach("slow", 1, slower)
    # What both are busy with is no part of it.
    stand.now += 20 * WORK_S
    assert stand.place(asked, views).backend == "fast"
    seconds = [stand.terms(asked, view(name))["prefill"] for name in ("fast", "slow")]
    assert seconds[1] / seconds[0] == pytest.approx(slower, rel=0.25)


def test_one_slow_prompt_does_not_make_a_backend_slow() -> None:
    stand = Stand()
    stand.teach("a", 20)
    stand.teach("b", 20)
    stand.serve(streamed(prompt_tokens=1_000), "b", slower=3.0)
    stand.teach("b", 1)
    asked = streamed(prompt_tokens=1_000)
    usual_s = stand.terms(asked, view("a"))["prefill"]
    assert stand.terms(asked, view("b"))["prefill"] == pytest.approx(usual_s, rel=0.1)


def test_a_backend_that_slows_down_is_repriced_within_twenty_answers() -> None:
    stand, asked = Stand(), streamed(prompt_tokens=1_000)
    for number in range(120):
        for backend in "bcd":
            stand.teach(backend, 1)
        stand.teach("a", 1, slower=1.0 if number < 100 else 5.0)
    stand.now += 20 * WORK_S
    slow_s, usual_s = (stand.place(asked, [view(backend)]).score for backend in "ab")
    assert slow_s > 3.0 * usual_s


def test_a_new_backend_is_judged_by_its_pool() -> None:
    stand = Stand()
    stand.teach("a", 150, slower=3.0)
    stand.now += 20 * WORK_S
    asked = streamed(prompt_tokens=1_000)
    price_s = stand.place(asked, [view("new")]).score
    assert price_s == pytest.approx(stand.place(asked, [view("a")]).score, rel=0.05)
    assert price_s > 2.5 * Stand().place(asked, [view("new")]).score


def test_noise_gives_no_backend_more_than_its_share() -> None:
    stand, rng = Stand(), Random(4)
    found: Counter[str] = Counter()
    views = [view(name) for name in "abcd"]
    for number in range(1_500):
        asked = streamed(prompt_tokens=200 * (1 + number % 10))
        placed = stand.place(asked, views)
        lease = stand.take(asked, placed)
        stand.now += max(0.2, rng.gauss(1.0, 0.3)) * (BASE_S + asked.prompt_tokens * TOKEN_S)
        stand.cost.started(lease, stand.now)
        stand.now += 9 * STEP_S * max(0.2, rng.gauss(1.0, 0.3))
        stand.finish(lease)
        found[placed.backend] += 1
    assert all(250 <= found[name] <= 550 for name in "abcd"), found


def test_streams_that_slow_each_other_down_make_a_large_batch_dear() -> None:
    """The sequences of one request count each for itself, and so do their tokens."""
    stand = Stand()
    for _ in range(60):
        leases = [stand.book(streamed(sequences=4), "a") for _ in range(8)]
        for lease in leases:
            stand.cost.started(lease, stand.now)
        for beside, lease in zip(range(28, -4, -4), leases, strict=True):
            took_s = 9 * (0.01 + 1e-3 * beside)
            stand.cost.finished(lease, Verdict.SERVED, Usage(10, 40), stand.now + took_s)
        stand.now += 1.0
    asked = streamed(output_tokens=50, prompt_tokens=1)
    terms = [stand.terms(asked, view("a", load=load, limit=10**6)) for load in (0, 20)]
    assert terms[1]["stream"] - terms[0]["stream"] == pytest.approx(STREAM * 50 * 20 * 1e-3, rel=0.05)
    assert terms[1]["harm"] - terms[0]["harm"] == pytest.approx(STREAM * 50 * 20 * 1e-3, rel=0.05)


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.SERVED])
def test_an_answer_that_was_cut_short_teaches_nothing_of_streams(verdict: Verdict) -> None:
    stand = Stand()
    before_s = stand.terms(streamed(), view("a"))["stream"]
    for _ in range(10):
        lease = stand.start(streamed(), "a")
        stand.now += 50.0
        stand.cost.finished(lease, verdict, Usage(10, 2), stand.now)
    assert stand.terms(streamed(), view("a"))["stream"] == before_s


# --- what is left -----------------------------------------------------------------------------------------------------


def test_nothing_is_left_when_all_leases_have_ended() -> None:
    stand, on = Stand(), view("a", served=BOTH, max_adapters=2, kv_tokens=10**6)
    rng = Random(1)
    adapters = (None, "lora", "other")
    verdicts = list(Verdict) * 5
    leases = [
        stand.book(chain(i, 3, adapter=adapters[i % 3], sequences=1 + i % 2, stream=i % 4 > 0), on)
        for i in range(len(verdicts))
    ]
    rng.shuffle(leases)
    for lease, verdict in zip(leases, verdicts, strict=True):
        stand.now += 0.3
        if rng.random() < 0.5:
            stand.cost.started(lease, stand.now)
            stand.cost.started(lease, stand.now)
        stand.place(chain(0, 3), [on])
        stand.cost.finished(lease, verdict, None, stand.now)
    backend_load = stand.cost._backend_loads["a"]
    assert (stand.cost._flights, backend_load._unstarted, dict(backend_load.adapters.users)) == ({}, {}, {})
    assert (backend_load._to_prefill_tokens, backend_load.in_flight, backend_load.in_use._users) == (0, 0, {})


def test_lost_backend_is_forgotten_with_its_requests_in_flight() -> None:
    stand, on = Stand(), view("a", kv_tokens=10**6, kv_used=0.5, served=BOTH, max_adapters=1)
    stand.teach("a", 20, slower=3.0)
    stand.teach("b", 20)
    stand.serve(chain(0, 30), on)
    answering, unstarted = stand.start(chain(0, 30, adapter="lora"), on), stand.book(chain(500, 30), on)
    stand.cost.lost("a")
    stand.now += 20 * WORK_S
    # The new process is like any other of the pool, and has nothing to do.
    asked = chain(0, 30, adapter="other")
    placed = stand.place(asked, [on])
    fresh = stand.place(asked, [view("fresh", kv_tokens=10**6, kv_used=0.5, served=BOTH, max_adapters=1)])
    assert (placed.terms, placed.held_tokens) == (fresh.terms, fresh.held_tokens)
    stand.cost.lost("a")
    stand.cost.started(unstarted, stand.now)
    assert stand.index.size("a") == 0
    for lease in (answering, unstarted):
        stand.finish(lease)
    assert stand.cost._flights == {}
    assert set(stand.cost._backend_loads) == {"b", "fresh"}
