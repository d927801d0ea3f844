"""The placement that prices in seconds, asked about views made by hand and told what became of its choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from llmproxy.core.domain import NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.fleet import View
from llmproxy.core.placement.cost import NEVER_S, CostPlacement
from llmproxy.core.prefix import PrefixIndex
from tests.core.make import request, view

NONE: frozenset[str] = frozenset()
BLOCK = 100.0
LATER = NoMatch(whole_model=False, later=True)
BOTH = frozenset({"base", "lora", "other"})
PER_TOKEN_S = 1 / 15_000
"""What a token of a prompt takes on the backends here; what is assumed before any was seen."""


class Stand:
    """A placement, the index that it asks, and the leases that it was told of."""

    def __init__(self, seed: int = 7) -> None:
        self.index = PrefixIndex()
        self.cost = CostPlacement(Random(seed), self.index)
        self.now = 0.0
        self._leases = 0

    def place(self, asked: Request, views: Sequence[View], ceiling: float = 1.0) -> Placed:
        found = self.cost.place(asked, views, ceiling, NONE, self.now)
        assert isinstance(found, Placed), found
        return found

    def waits(self, asked: Request, views: Sequence[View], ceiling: float = 1.0) -> bool:
        found = self.cost.place(asked, views, ceiling, NONE, self.now)
        assert isinstance(found, Placed) or found == LATER
        return found == LATER

    def terms(self, asked: Request, on: View) -> dict[str, float]:
        return dict(self.place(asked, [on]).terms)

    def book(self, asked: Request, on: str | View) -> int:
        placed = self.place(asked, [view(on, max_model_len=None) if isinstance(on, str) else on])
        self._leases += 1
        self.cost.booked(self._leases, asked, placed, self.now)
        return self._leases

    def finish(self, lease: int, output_tokens: int = 10, cached_tokens: int | None = None) -> None:
        usage = Usage(10, output_tokens, cached_tokens)
        self.cost.finished(lease, Verdict.SERVED, usage, self.now)

    def start(self, asked: Request, on: str | View, slower: float = 1.0) -> int:
        """Book it where nothing else has to begin, and let its first byte come."""
        lease = self.book(asked, on)
        self.now += slower * (0.03 + self.cost._flights[lease].own_tokens * PER_TOKEN_S)
        self.cost.started(lease, self.now)
        return lease

    def serve(self, asked: Request, on: str | View, slower: float = 1.0) -> None:
        """Alone there, from its booking to its end."""
        lease = self.start(asked, on, slower)
        self.now += 9 * slower * 0.01
        self.finish(lease)

    def teach(self, backend: str, times: int, slower: float = 1.0) -> None:
        """So many first bytes and streams of a backend this much slower than what is assumed of all."""
        for i in range(times):
            self.serve(streamed(prompt_tokens=200 * (1 + i % 10)), backend, slower)

    def releases(self, backend: str, every_s: float) -> None:
        """Leases of `backend` end one after the other, and one stays."""
        leases = [self.start(streamed(), backend) for _ in range(5)]
        for lease in leases[1:]:
            self.now += every_s
            self.finish(lease)


def streamed(**given: Any) -> Request:
    return request(**({"stream": True} | given))


def chain(first: int, blocks: int, **given: Any) -> Request:
    """A prompt of whole blocks, those from `first` on."""
    prefix = tuple(range(first, first + blocks))
    facts = {"prefix": prefix, "prefix_tokens": BLOCK, "prompt_tokens": int(blocks * BLOCK)}
    return streamed(**(facts | given))


# --- the prompt's cache -----------------------------------------------------------------------------------------------


def test_a_warm_backend_is_preferred_to_an_idle_one() -> None:
    stand, views = Stand(), [view("warm", load=3), view("cold")]
    stand.serve(chain(0, 30), "warm")
    assert stand.place(chain(0, 30), views).backend == "warm"
    assert stand.place(chain(500, 30), views).backend == "cold"


@pytest.mark.parametrize(("queued_tokens", "best"), [(1_000, "warm"), (10_000, "cold")])
def test_a_warm_backend_is_left_when_its_queue_is_longer_than_the_prefill_that_it_saves(
    queued_tokens: int, best: str
) -> None:
    stand = Stand()
    stand.serve(chain(0, 30), "warm")
    stand.book(streamed(prompt_tokens=queued_tokens), "warm")
    assert stand.place(chain(0, 30), [view("warm", load=1), view("cold")]).backend == best


def test_a_prompt_is_taken_to_be_cached_from_its_first_byte_on() -> None:
    stand, on = Stand(), view("a")
    lease = stand.book(chain(0, 10), on)
    assert stand.place(chain(0, 20), [on]).cached_tokens == 0
    stand.cost.started(lease, stand.now)
    assert stand.place(chain(0, 20), [on]).cached_tokens == 1_000
    assert stand.place(chain(500, 20), [on]).cached_tokens == 0
    # The last token is always computed.
    assert stand.place(chain(0, 10), [on]).cached_tokens == 999


def test_what_never_began_is_not_taken_to_be_cached() -> None:
    stand = Stand()
    lease = stand.book(chain(0, 10), "a")
    stand.cost.finished(lease, Verdict.FAILED, None, stand.now)
    assert stand.place(chain(0, 10), [view("a")]).cached_tokens == 0


def test_a_lost_backend_has_nothing_cached_and_the_size_of_its_cache_is_told_again() -> None:
    stand, on = Stand(), view("a", kv_tokens=20_000)
    stand.serve(chain(0, 10), on)
    assert stand.place(chain(0, 10), [on]).cached_tokens == 999
    assert stand.index.limit("a") == 200
    stand.cost.lost("a")
    assert stand.place(chain(0, 10), [on]).cached_tokens == 0
    assert stand.index.limit("a") == 200


def test_an_engine_that_has_less_cached_than_expected_ages_what_is_believed() -> None:
    stand, on = Stand(), view("a", kv_tokens=20_000)
    stand.serve(chain(0, 10), on)
    for _ in range(5):
        lease = stand.book(chain(0, 10), on)
        stand.cost.started(lease, stand.now)
        stand.finish(lease, cached_tokens=0)
    assert stand.index.limit("a") < 200


def test_what_a_cold_prompt_displaces_counts_by_how_much_the_pool_hits() -> None:
    stand = Stand()
    asked = chain(900, 30)
    assert stand.terms(asked, view("a"))["eviction"] == 0.0
    for _ in range(300):
        stand.serve(chain(0, 10), "a")
    terms = stand.terms(asked, view("a"))
    assert terms["eviction"] == pytest.approx(terms["prefill"], rel=0.05)


# --- what else makes a backend dear -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"load": 1}, {"load": 5}),
        ({"kv_used": 0.1}, {"kv_used": 0.8}),
        ({"load": 5, "limit": 100}, {"load": 5}),
        ({"kv_used": 0.5, "kv_tokens": 10**6}, {"kv_used": 0.5, "kv_tokens": 10**4}),
    ],
)
def test_a_cold_prompt_prefers_the_emptier_backend(better: dict[str, Any], worse: dict[str, Any]) -> None:
    views = [view("worse", **worse), view("better", **better)]
    assert {Stand(seed).place(streamed(prompt_tokens=3_000), views).backend for seed in range(10)} == {"better"}


def test_the_terms_add_up_to_the_score() -> None:
    stand = Stand()
    for _ in range(2):
        stand.serve(chain(0, 10), "a")
    stand.book(streamed(prompt_tokens=700), "a")
    placed = stand.place(chain(0, 30, adapter="lora"), [view("a", served=BOTH, load=4, kv_used=0.5, kv_tokens=9_000)])
    assert {"queue", "prefill", "eviction", "harm", "adapter", "memory"} == {name for name, _ in placed.terms}
    assert all(seconds > 0.0 for _, seconds in placed.terms)
    assert placed.score == pytest.approx(sum(seconds for _, seconds in placed.terms))
    assert placed.candidates == 1


def test_a_queue_is_worked_off_as_time_goes_by() -> None:
    stand = Stand()
    before_s = stand.terms(streamed(), view("a"))["queue"]
    first, _ = (stand.book(streamed(prompt_tokens=3_000), "a") for _ in range(2))
    full_s = stand.terms(streamed(), view("a"))["queue"]
    assert full_s == pytest.approx(before_s + 6_000 * PER_TOKEN_S)
    stand.now += 0.1
    assert stand.terms(streamed(), view("a"))["queue"] == pytest.approx(full_s - 0.1)
    stand.cost.finished(first, Verdict.WITHDRAWN, None, stand.now)
    assert stand.terms(streamed(), view("a"))["queue"] == pytest.approx(before_s + 0.2 - 0.1)


def test_the_next_prompt_is_begun_when_the_one_before_it_has_its_first_byte() -> None:
    stand = Stand()
    before_s = stand.terms(streamed(), view("a"))["queue"]
    first, _ = (stand.book(streamed(prompt_tokens=3_000), "a") for _ in range(2))
    stand.now += 0.23
    stand.cost.started(first, stand.now)
    assert stand.terms(streamed(), view("a"))["queue"] == pytest.approx(before_s + 0.2)
    # A byte that comes later is not the first one.
    stand.now += 20.0
    overdue_s = stand.terms(streamed(), view("a"))["queue"]
    stand.cost.started(first, stand.now)
    assert stand.terms(streamed(), view("a"))["queue"] == overdue_s


def test_a_first_byte_that_is_overdue_makes_a_backend_dear() -> None:
    stand, views = Stand(), [view("stuck", load=1), view("other", load=8)]
    stand.serve(chain(0, 30), "stuck")
    lease = stand.book(chain(0, 30), "stuck")
    assert stand.place(chain(0, 30), views).backend == "stuck"
    stand.now += 20.0
    assert stand.place(chain(0, 30), views).backend == "other"
    assert stand.terms(chain(0, 30), views[0])["queue"] > 19.0
    stand.cost.finished(lease, Verdict.FAILED, None, stand.now)
    assert stand.terms(chain(0, 30), views[0])["queue"] < 1.0


def test_an_answer_without_a_stream_is_never_overdue_and_leaves_the_queue_in_its_time() -> None:
    stand = Stand()
    before_s = stand.terms(streamed(), view("a"))["queue"]
    leases = [stand.book(request(prompt_tokens=3_000, stream=False), "a") for _ in range(2)]
    assert stand.terms(streamed(), view("a"))["queue"] > before_s + 0.3
    stand.now += 20.0
    assert stand.terms(streamed(), view("a"))["queue"] == before_s
    for lease in leases:
        stand.cost.started(lease, stand.now)
        stand.finish(lease)
    # Its first byte comes with its last, and says nothing of how long a prompt takes.
    assert stand.terms(streamed(), view("a"))["queue"] == before_s


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_the_backend_that_has_the_adapter_is_preferred() -> None:
    views = [view("cold", served=BOTH, load=1), view("has", served=BOTH, load=2, resident=frozenset({"lora"}))]
    assert Stand().place(streamed(adapter="lora"), views).backend == "has"
    assert Stand().place(streamed(), views).backend == "cold"


def test_an_adapter_whose_slots_all_serve_others_waits_as_long_as_an_answer_takes() -> None:
    stand = Stand()
    one_slot = view("a", served=BOTH, max_adapters=1, resident=frozenset({"lora"}))
    loading_s = stand.terms(streamed(adapter="other"), one_slot)["adapter"]
    lease = stand.book(streamed(adapter="lora"), one_slot)
    assert "adapter" not in stand.terms(streamed(adapter="lora"), one_slot)
    assert stand.terms(streamed(adapter="other"), one_slot)["adapter"] > 10 * loading_s
    stand.finish(lease)
    assert stand.terms(streamed(adapter="other"), one_slot)["adapter"] < 10 * loading_s


# --- a full backend worth waiting for ---------------------------------------------------------------------------------


FULL_AND_OTHER = [view("home", load=10, max_model_len=None), view("other", max_model_len=None)]


@pytest.mark.parametrize(("every_s", "waits"), [(0.1, True), (5.0, False)])
def test_a_full_home_is_waited_for_when_it_has_room_before_the_prefill_elsewhere_is_done(
    every_s: float, waits: bool
) -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    stand.releases("home", every_s)
    assert stand.waits(chain(0, 300), FULL_AND_OTHER) == waits
    # Others may have the room meanwhile.
    assert stand.place(chain(1_000, 300), FULL_AND_OTHER).backend == "other"


def test_a_full_backend_that_never_released_a_slot_is_not_waited_for() -> None:
    stand = Stand()
    stand.start(chain(0, 300), "home")
    assert stand.place(chain(0, 300), FULL_AND_OTHER).backend == "other"
    assert NEVER_S > 1_000.0


def test_a_full_home_that_many_wait_for_is_waited_for_by_no_more() -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    stand.releases("home", 0.1)
    asked = [chain(0, 300) for _ in range(60)]
    waiting = [stand.waits(one, FULL_AND_OTHER) for one in asked]
    count = sum(waiting)
    # About two seconds of prefill, and ten releases in one of them.
    assert 10 <= count <= 40
    assert waiting == [True] * count + [False] * (60 - count)
    # Those that wait may be asked about again in the same pass, and keep their places.
    assert all(stand.waits(one, FULL_AND_OTHER) for one in asked[:count] * 3)
    stand.now += 0.01
    assert stand.waits(chain(0, 300), FULL_AND_OTHER)


def test_a_home_that_has_stopped_to_release_slots_is_not_waited_for() -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    stand.releases("home", 0.1)
    assert stand.waits(chain(0, 300), FULL_AND_OTHER)
    stand.now += 30.0
    assert stand.place(chain(0, 300), FULL_AND_OTHER).backend == "other"


def test_a_band_that_must_leave_room_waits_for_as_many_releases_more() -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    stand.releases("home", 0.5)
    views = [view("home", load=10, max_model_len=None), view("other", max_model_len=None)]
    assert stand.waits(chain(0, 300), views, ceiling=0.95)
    assert stand.place(chain(0, 300), views, ceiling=0.4).backend == "other"


def test_what_only_a_full_context_can_hold_waits_without_hiding_others_of_its_model() -> None:
    short, long = view("short", max_model_len=100), view("long", max_model_len=1_000, load=10)
    found = Stand().cost.place(streamed(prompt_tokens=500), [short, long], 1.0, NONE, 0.0)
    assert found == NoMatch(whole_model=False)


# --- what is learned --------------------------------------------------------------------------------------------------


def test_the_faster_of_two_is_preferred_when_it_is_known() -> None:
    stand, views = Stand(), [view("fast", load=3), view("slow", load=2)]
    asked = streamed(prompt_tokens=1_000)
    assert stand.place(asked, views).backend == "slow"
    for _ in range(10):
        stand.teach("fast", 3)
        stand.teach("slow", 3, slower=4.0)
    assert stand.place(asked, views).backend == "fast"


def test_a_backend_that_slows_down_is_repriced_within_thirty_answers() -> None:
    stand = Stand()
    stand.teach("a", 300)
    before_s = stand.place(streamed(prompt_tokens=1_000), [view("a")]).score
    stand.teach("a", 30, slower=5.0)
    assert stand.place(streamed(prompt_tokens=1_000), [view("a")]).score > 3.0 * before_s


def test_a_new_backend_is_judged_by_its_pool() -> None:
    stand = Stand()
    stand.teach("a", 100, slower=3.0)
    asked = streamed(prompt_tokens=1_000)
    price_s = stand.place(asked, [view("new")]).score
    assert price_s == pytest.approx(stand.place(asked, [view("a")]).score)
    assert price_s > 2.5 * Stand().place(asked, [view("new")]).score


def test_a_batch_that_slows_down_with_each_sequence_is_dear_when_it_is_large() -> None:
    """The sequences of one request count each for itself, and so do their tokens."""
    stand = Stand()
    for _ in range(10):
        leases = [stand.book(streamed(sequences=4), "a") for _ in range(8)]
        for lease in leases:
            stand.cost.started(lease, stand.now)
        for beside, lease in zip(range(28, -4, -4), leases, strict=True):
            took_s = 9 * (0.01 + 1e-3 * beside)
            stand.cost.finished(lease, Verdict.SERVED, Usage(10, 40), stand.now + took_s)
        stand.now += 1.0
    harm_s = [stand.terms(streamed(), view("a", load=load, limit=10**6))["harm"] for load in (0, 20)]
    assert harm_s[1] - harm_s[0] == pytest.approx(20 * 1e-3, rel=0.05)


def test_nothing_is_left_when_all_leases_have_ended() -> None:
    stand, on = Stand(), view("a", served=BOTH, max_adapters=2, kv_tokens=10**6)
    rng = Random(1)
    adapters = (None, "lora", "other")
    leases = [
        stand.book(chain(i, 3, adapter=adapters[i % 3], sequences=1 + i % 2, stream=i % 4 > 0), on) for i in range(40)
    ]
    rng.shuffle(leases)
    for lease, verdict in zip(leases, list(Verdict) * 5, strict=True):
        stand.now += 0.3
        if rng.random() < 0.5:
            stand.cost.started(lease, stand.now)
            stand.cost.started(lease, stand.now)
        stand.place(chain(0, 3), [on])
        stand.cost.finished(lease, verdict, None, stand.now)
    known = stand.cost._known["a"]
    assert (stand.cost._flights, known.unstarted, dict(known.adapters)) == ({}, {}, {})
    assert (known.to_prefill_tokens, known.in_flight) == (0.0, 0)


# --- among equals -----------------------------------------------------------------------------------------------------


def test_equal_prices_go_to_the_least_loaded() -> None:
    views = [view("more", load=2, limit=100), view("less", load=1, limit=100)]
    assert {Stand(seed).place(streamed(), views).backend for seed in range(20)} == {"less"}


def test_a_thousandth_of_a_second_is_no_difference() -> None:
    views = [view("cheaper", load=5, limit=10), view("emptier", load=20, limit=100)]
    cheaper, emptier = (Stand().place(streamed(), [one]).score for one in views)
    assert cheaper < emptier
    assert {Stand(seed).place(streamed(), views).backend for seed in range(20)} == {"emptier"}
    assert (
        Stand().place(streamed(), [view("cheaper", load=5), view("dearer", load=200, limit=1_000)]).backend == "cheaper"
    )


def test_equal_backends_are_drawn_alike() -> None:
    stand = Stand()
    found = Counter(stand.place(streamed(), [view(name) for name in "abcd"]).backend for _ in range(2_000))
    assert all(400 <= found[name] <= 600 for name in "abcd"), found
