"""Bounds on prefills: prompts wait while backends have enough of them, or while streams would miss their objective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Grant,
    Outcome,
    Preempt,
    Request,
    Slo,
    Verdict,
)
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.queue import FLOW_LOOK_MAX
from llmproxy.core.settings import Settings
from tests.core.make import DEFAULTS, grants, listing, pools, reading, refusal, request

PACE = Slo(tpot_s=0.03)
PROMPT = 30_000
"""About 2 s of prefill."""
ANY_TIME = replace(DEFAULTS, capacity=replace(DEFAULTS.capacity, prompt_window_s=None))


def asked(name: str, now: float = 0.0, **given: Any) -> Request:
    facts: dict[str, Any] = {"id": name, "arrived_s": now, "stream": True, "slo": PACE, "prompt_tokens": PROMPT}
    return request(**(facts | given))


def streaming(
    *backends: str, settings: Settings = ANY_TIME, adapters: tuple[str, ...] = ()
) -> tuple[Pools, list[Grant]]:
    """Backends with 64 slots and one started stream each."""
    listings = {name: listing(*adapters, max_model_len=None) for name in backends}
    of = pools(dict.fromkeys(backends, 64), settings, listings=listings)
    held = []
    for name in backends:
        of.submit(asked(f"stream {name}", prompt_tokens=1), 0.0)
        (one,) = grants(of, 0.0)
        of.apply(Started(one.lease), 0.04)
        held.append(one)
    assert {one.placed.backend for one in held} == set(backends)
    return of, held


def flood(of: Pools, names: Iterable[str], now: float, **given: Any) -> list[Grant]:
    for name in names:
        of.submit(asked(name, now, **given), now)
    return grants(of, now)


def windowed(*adapters: str, **given: Any) -> Pools:
    """A backend with a stream, with a learned prefill speed of 15,000 tokens/s."""
    of, _ = streaming("a", settings=replace(DEFAULTS, **given), adapters=adapters)
    for at in (0.1, 0.3, 0.5):
        (one,) = flood(of, "-", at, slo=None, prompt_tokens=1_500)
        of.apply(Started(one.lease), at + 0.13)
        of.apply(Returned(one.lease, Verdict.SERVED), at + 0.14)
    return of


def test_prompts_beyond_the_share_wait_and_go_without_any_event() -> None:
    of, _ = streaming("a")
    went = flood(of, "abcdefgh", 1.0)
    assert 2 <= len(went) <= 5
    now = 1.0
    while len(went) < 8:
        later = of.next_wakeup(now)
        assert later is not None
        assert now < later < now + 10.0
        assert not grants(of, (now + later) / 2)
        now = later
        found = grants(of, now)
        assert len(found) == 1
        went += found
    assert [one.request.id for one in went] == list("abcdefgh")


def test_without_an_objective_all_go_at_once() -> None:
    of = pools({"a": 64}, ANY_TIME)
    assert len(flood(of, "abcdefgh", 1.0, slo=None)) == 8


def test_prompts_beyond_the_window_wait_and_go_without_any_event() -> None:
    of = windowed()
    assert len(flood(of, "ab", 1.0, slo=None, prompt_tokens=6_000)) == 1
    later = of.next_wakeup(1.0)
    assert later is not None
    assert 1.05 < later < 1.4, "one takes 0.4 s, and 0.3 s of that may be left"
    assert not grants(of, (1.0 + later) / 2)
    assert [one.request.id for one in grants(of, later)] == ["b"]


def test_first_byte_lets_the_next_prompt_go() -> None:
    of = windowed()
    (first,) = flood(of, "ab", 1.0, prompt_tokens=6_000)
    of.apply(Started(first.lease), 1.01)
    assert [one.request.id for one in grants(of, 1.01)] == ["b"]


def test_request_that_would_be_late_behind_a_full_window_is_refused() -> None:
    of = windowed(refuse_late=True)
    hurried = asked("h", 1.0, slo=Slo(ttft_s=0.25), prompt_tokens=1_500)
    (first,) = flood(of, "a", 1.0, slo=None, prompt_tokens=6_000)
    assert refusal(of.submit, hurried, 1.0).outcome is Outcome.REJECTED_DEADLINE
    of.apply(Started(first.lease), 1.01)
    of.submit(hurried, 1.01)
    assert [one.request.id for one in grants(of, 1.01)] == ["h"]


def test_critical_request_takes_back_prompts_that_fill_the_window() -> None:
    of = windowed()
    low = flood(of, "abcdefgh", 1.0, band=SHEDDABLE, prompt_tokens=1_700)
    assert len(low) == 3
    of.submit(asked("urgent", 1.0, band=CRITICAL), 1.0)
    (back,) = of.decide(1.0)
    assert isinstance(back, Preempt)
    assert back.request.id == "c"
    of.apply(Returned(low[-1].lease, Verdict.PREEMPTED), 1.0)
    assert [one.request.id for one in grants(of, 1.0)] == ["urgent"]


def test_prompt_that_an_engine_never_begins_does_not_close_the_window() -> None:
    of = windowed()
    flood(of, "n", 1.0, slo=None, prompt_tokens=1_500)
    for number in range(20):
        now = 2.0 + number
        (one,) = flood(of, "-", now, slo=None, prompt_tokens=1_500)
        of.apply(Started(one.lease), now + 0.13)
        of.apply(Returned(one.lease, Verdict.SERVED), now + 0.14)


def test_prompt_that_waits_for_an_adapter_slot_does_not_close_the_window() -> None:
    of = windowed("x", "y")
    of.backends["a"].observe(reading(1.0, max_adapters=1))
    (one,) = flood(of, "x", 1.0, adapter="x", model="x", slo=None, prompt_tokens=100)
    of.apply(Started(one.lease), 1.2)
    # The slot is taken until the answer to x ends.
    assert len(flood(of, "y", 1.3, adapter="y", model="y", slo=None, prompt_tokens=PROMPT)) == 1
    (first,) = flood(of, "1", 1.4, slo=None, prompt_tokens=6_000)
    assert not flood(of, "2", 1.4, slo=None, prompt_tokens=6_000)
    of.apply(Started(first.lease), 1.8)
    assert [one.request.id for one in grants(of, 1.8)] == ["2"]


def test_window_is_not_guessed_without_first_bytes() -> None:
    of = windowed()
    (_, *rest) = flood(of, "abcd", 1.0, stream=False, prompt_tokens=6_000)
    assert len(rest) == 3
    never = pools({"a": 64}, listings={"a": listing(max_model_len=None)})
    assert len(flood(never, "abcd", 1.0, slo=None, prompt_tokens=6_000)) == 4


def test_short_prompts_share_the_window() -> None:
    of = windowed()
    went = flood(of, "abcdefghijklmnopqrst", 1.0, prompt_tokens=600)
    assert 5 <= len(went) <= 10


def test_backend_without_streams_takes_any_prompt() -> None:
    of, (stream,) = streaming("a")
    went = flood(of, "abcdefgh", 1.0)
    for one in [stream, *went]:
        of.apply(Returned(one.lease, Verdict.CLIENT_GONE), 1.0)
    assert grants(of, 1.0)


def test_request_takes_an_open_backend_or_waits_for_a_better_one() -> None:
    of, _ = streaming("a", "b")
    went = flood(of, "abcdefgh", 1.0)
    assert {one.placed.backend for one in went} == {"a", "b"}
    assert len(went) > len(flood(streaming("a")[0], "abcdefgh", 1.0))


def test_request_goes_to_an_idle_backend_that_had_more_prompts_lately() -> None:
    of, streams = streaming("a", "b")
    (stream,) = [one for one in streams if one.placed.backend == "b"]
    of.apply(Returned(stream.lease, Verdict.SERVED), 0.5)
    for one in flood(of, "abcdefghijklmnop", 1.0, slo=None, backend="b"):
        of.apply(Returned(one.lease, Verdict.SERVED), 1.0)
    closed = flood(of, "qrstuvwx", 1.0, backend="a")
    assert len(closed) < 8
    assert [one.placed.backend for one in flood(of, "y", 1.0)] == ["b"]


def test_lower_band_leaves_a_part_of_the_share_to_a_higher_one_and_still_goes() -> None:
    of, _ = streaming("a")
    of.submit(asked("used", prompt_tokens=1, band=CRITICAL), 0.5)
    grants(of, 0.5)
    names = "abcdefghijklmnopqrstuvwxyz"
    low = flood(of, names, 1.0, band=SHEDDABLE, prompt_tokens=6_000)
    high, _ = streaming("a")
    assert len(low) < len(flood(high, names, 1.0, prompt_tokens=6_000))
    later = of.next_wakeup(1.0)
    assert later is not None
    assert [one.request.id for one in grants(of, later)] == [names[len(low)]]


def test_objective_of_a_stream_holds_back_no_higher_band() -> None:
    of, _ = streaming("a")
    assert len(flood(of, "abcdefgh", 1.0)) < 8
    assert len(flood(of, "ijklmnop", 1.0, band=CRITICAL, slo=None)) == 8


def test_band_that_is_owed_its_minimum_share_and_rationed_holds_back_no_higher_band() -> None:
    share = {SHEDDABLE: 0.5}
    of, (stream,) = streaming("a", settings=replace(DEFAULTS, capacity=ANY_TIME.capacity, min_shares=share))
    of.apply(Returned(stream.lease, Verdict.SERVED), 0.5)
    (low,) = flood(of, "s", 0.6, band=SHEDDABLE, prompt_tokens=1)
    of.apply(Started(low.lease), 0.65)
    assert len(flood(of, "abcdefgh", 1.0, band=SHEDDABLE, prompt_tokens=15_000)) < 8
    for number in range(40):
        now = 1.0 + 0.01 * number
        (one,) = flood(of, [f"critical {number}"], now, band=CRITICAL, slo=None)
        of.apply(Started(one.lease), now)
        of.apply(Returned(one.lease, Verdict.SERVED), now)


def test_critical_request_takes_back_prompts_that_were_not_begun() -> None:
    of, _ = streaming("a")
    flood(of, "s", 0.5, band=CRITICAL, prompt_tokens=15_000)
    low = {one.lease: one for one in flood(of, "abcd", 1.0, band=SHEDDABLE, prompt_tokens=2 * PROMPT)}
    of.submit(asked("urgent", 1.0, band=CRITICAL), 1.0)
    (back,) = of.decide(1.0)
    assert isinstance(back, Preempt)
    of.apply(Returned(low[back.lease].lease, Verdict.PREEMPTED), 1.0)
    assert grants(of, 1.0)[0].request.id == "urgent"


def test_bound_request_waits_without_keeping_the_scheduler_busy() -> None:
    of, _ = streaming("a", "b")
    went = flood(of, "abcdefgh", 1.0, backend="a")
    assert 2 <= len(went) <= 5
    assert [one.placed.backend for one in flood(of, "i", 1.0)] == ["b"]
    now, wakeups = 1.0, 0
    while not (found := grants(of, now)):
        later = of.next_wakeup(now)
        assert later is not None
        assert later > now
        now, wakeups = later, wakeups + 1
    assert wakeups < 5
    assert [one.request.id for one in found] == ["abcdefgh"[len(went)]]


def test_many_requests_bound_to_a_closed_backend_hold_up_no_others() -> None:
    of, _ = streaming("a", "b")
    bound = [str(number) for number in range(3 * FLOW_LOOK_MAX)]
    went = len(flood(of, bound, 1.0, backend="a", deadline_s=1e9))
    assert went <= 5
    assert [one.placed.backend for one in flood(of, "i", 1.0)] == ["b"]
    now, wakeups = 1.0, 0
    while went < len(bound):
        later = of.next_wakeup(now)
        assert later is not None
        assert later > now
        now, wakeups = later, wakeups + 1
        went += len(grants(of, now))
    assert wakeups < 2 * len(bound)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("window_s", [None, 0.3])
@pytest.mark.parametrize("seed", range(20))
def test_no_band_passes_a_waiting_higher_band(seed: int, window_s: float | None) -> None:
    rng = Random(seed)
    of, held = streaming(
        "a", "b", settings=replace(DEFAULTS, capacity=replace(DEFAULTS.capacity, prompt_window_s=window_s))
    )
    now, waiting, went, waited = 1.0, dict[str, int](), 0, 0
    for number in range(150):
        now += rng.expovariate(2.0)
        if rng.random() < 0.7:
            band = rng.choice((CRITICAL, DEFAULT, SHEDDABLE))
            tokens = rng.choice((100, 5_000, PROMPT))
            slo = rng.choice((PACE, PACE, Slo(tpot_s=0.02), Slo(ttft_s=1.0), None))
            of.submit(asked(str(number), now, band=band, prompt_tokens=tokens, slo=slo, deadline_s=1e9), now)
            waiting[str(number)] = band
        elif held:
            one = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.5:
                of.apply(Started(one.lease), now)
            of.apply(Returned(one.lease, Verdict.SERVED), now)
        for decision in of.decide(now):
            if isinstance(decision, Preempt):
                (back,) = [one for one in held if one.lease == decision.lease]
                held.remove(back)
                of.apply(Returned(back.lease, Verdict.PREEMPTED), now)
                of.submit(decision.request, now, entry=AdmissionKind.PREEMPTED)
                waiting[decision.request.id] = decision.request.band
            if not isinstance(decision, Grant):
                continue
            band = waiting.pop(decision.request.id)
            assert band >= max(waiting.values(), default=band), "it passed a higher band"
            held.append(decision)
            went += 1
        waited += bool(waiting)
        of.check(now)
    assert went > 35
    assert waited > 10, "nothing ever waited"


def test_objectives_of_any_size_are_counted_in_and_out() -> None:
    of, (stream,) = streaming("a")
    (loose,) = flood(of, "l", 1.0, slo=Slo(tpot_s=1e9), prompt_tokens=100)
    of.apply(Returned(stream.lease, Verdict.SERVED), 1.0)
    (tight,) = flood(of, "t", 1.0, slo=Slo(tpot_s=1e-9), prompt_tokens=100)
    of.apply(Returned(loose.lease, Verdict.SERVED), 1.0)
    assert len(flood(of, "x", 1.0, prompt_tokens=100)) == 1
    of.apply(Returned(tight.lease, Verdict.SERVED), 1.0)
    of.check(1.0)
