"""The scores of the endpoint picker, and its memory of earlier choices."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request, Verdict
from llmproxy.lab.baselines.endpoint_picker import ENDPOINT_PICKERS, Candidate, blend, sticky
from tests.core.make import reading, request, view

NONE: frozenset[str] = frozenset()
BLOCK = 100.0


class EppBench:
    """A preset, and the leases that it was notified of."""

    def __init__(self, preset: str, seed: int = 7) -> None:
        self.policy = ENDPOINT_PICKERS[preset](Random(seed))
        self._leases = 0

    def placed(self, asked: Request, views: Sequence[View]) -> Placed:
        found = self.policy.place(asked, views, 1.0, NONE, 0.0)
        assert isinstance(found, Placed), found
        return found

    def send(self, asked: Request, views: Sequence[View]) -> int:
        placed = self.placed(asked, views)
        self._leases += 1
        self.policy.booked(self._leases, asked, placed, 0.0)
        return self._leases

    def serve(self, asked: Request, views: Sequence[View]) -> None:
        lease = self.send(asked, views)
        self.policy.started(lease, 0.0)
        self.policy.finished(lease, Verdict.SERVED, None, 0.0)


def asks(*blocks: int, tokens: int | None = None) -> Request:
    prompt_tokens = int(len(blocks) * BLOCK) if tokens is None else tokens
    return request(prompt_tokens=prompt_tokens, prefix=blocks, prefix_tokens=BLOCK)


def seen(name: str, **given: Any) -> View:
    return view(name, max_model_len=None, reading=reading(0.0, **given))


def idle(*names: str) -> list[View]:
    return [seen(name) for name in names]


def candidate(name: str, match: float = 0.0, ahead: int = 0, new_tokens: int = 0, **given: Any) -> Candidate:
    return Candidate(seen(name, **given), match, 0, new_tokens, ahead)


# --- the profiles -----------------------------------------------------------------------------------------------------


def test_the_blend_is_two_queue_two_kv_three_prefix() -> None:
    scored = blend()(
        [
            candidate("a", match=0.5, waiting=0, kv_used=0.5),
            candidate("b", match=1.0, waiting=1, kv_used=0.2),
            candidate("c", waiting=4, kv_used=None),
        ]
    )
    assert scored.terms == {"queue": [1.0, 0.75, 0.0], "kv": [0.5, 0.8, 1.0], "prefix": [0.5, 1.0, 0.0]}
    assert scored.scores == pytest.approx([2 + 1 + 1.5, 1.5 + 1.6 + 3, 2.0])
    assert blend()([candidate("a", waiting=3)]).scores == [4.0]


def test_a_backend_without_a_reading_counts_as_idle() -> None:
    unread = Candidate(view("a"), 0.0, 0, 0, 0)
    assert blend()([unread, candidate("b", waiting=2, kv_used=0.5)]).scores == [4.0, 1.0]


def test_four_fifths_stick_until_18_seconds_of_tokens_are_ahead() -> None:
    def kept(match: float, ahead: int, **parameters: float) -> str:
        found = sticky(**parameters)([candidate("warm", match, ahead), candidate("cold", 0.79, 1_000)])
        return " ".join(one.view.backend for one in found.kept)

    assert kept(0.8, 1_000 + 286_704) == "warm"
    assert kept(0.8, 1_000 + 286_705) == "warm cold"
    assert kept(0.8, 10**9, penalty_s=0.0) == "warm"
    assert kept(0.79, 0) == "warm cold"


def test_of_those_kept_the_fewest_tokens_win() -> None:
    scored = sticky()([candidate("a", 0.9, 500, new_tokens=100), candidate("b", 1.0, 700), candidate("c")])
    assert scored.terms == {"tokens": [600, 700], "match": [0.9, 1.0]}
    assert scored.scores == [1 - 600 / 4_194_304, 1 - 700 / 4_194_304]


# --- the presets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["epp_blend", "epp_sticky"])
def test_a_prompt_goes_where_it_was_sent_before(preset: str) -> None:
    bench = EppBench(preset)
    bench.serve(asks(1, 2, 3, 4), idle("b"))
    placed = bench.placed(asks(1, 2, 3, 4, 5), idle("a", "b", "c"))
    assert (placed.backend, placed.cached_tokens, placed.candidates) == ("b", 400, 3)
    assert dict(placed.terms)["prefix" if preset == "epp_blend" else "match"] == 0.8


def test_a_warm_backend_without_room_is_not_waited_for() -> None:
    bench = EppBench("epp_sticky")
    bench.serve(asks(1, 2), idle("a"))
    assert bench.placed(asks(1, 2), [view("a", load=10), view("b", load=9)]).backend == "b"


def test_tokens_are_in_flight_until_the_first_byte_or_the_end() -> None:
    bench = EppBench("epp_sticky")

    def ahead() -> float:
        return dict(bench.placed(asks(9), idle("a")).terms)["tokens"] - BLOCK

    first = bench.send(asks(1, 2, tokens=250), idle("a"))
    second = bench.send(asks(1, 2, 3, tokens=350), idle("a"))
    assert ahead() == 250 + 150
    bench.policy.started(first, 0.0)
    bench.policy.started(first, 0.0)
    assert ahead() == 150
    bench.policy.finished(second, Verdict.FAILED, None, 0.0)
    bench.policy.finished(first, Verdict.SERVED, None, 0.0)
    assert ahead() == 0


def test_a_lost_backend_has_nothing_cached() -> None:
    bench = EppBench("epp_blend")
    for _ in range(2):
        bench.serve(asks(1), [seen("a", kv_tokens=200), seen("b", waiting=9)])
        assert dict(bench.placed(asks(1), [seen("a", kv_tokens=200)]).terms)["prefix"] == 1.0
        bench.policy.lost("a")
        assert dict(bench.placed(asks(1), [seen("a", kv_tokens=200)]).terms)["prefix"] == 0.0


def test_index_is_as_large_as_the_last_read_cache() -> None:
    bench = EppBench("epp_blend")

    def match(*blocks: int) -> float:
        return dict(bench.placed(asks(*blocks), [view("a", max_model_len=None)]).terms)["prefix"]

    small = [seen("a", kv_tokens=400)]
    bench.serve(asks(1, 2), small)
    # A reading that is missing shows no larger cache.
    bench.serve(asks(7, 8), [view("a", max_model_len=None)])
    assert (match(1, 2), match(7, 8)) == (1.0, 1.0)
    bench.serve(asks(4, 5), small)
    assert (match(1, 2), match(7, 8), match(4, 5)) == (0.0, 1.0, 1.0)
    bench.policy.lost("a")
    bench.serve(asks(1, 2), small)
    bench.serve(asks(7, 8), small)
    bench.serve(asks(4, 5), small)
    assert match(1, 2) == 0.0


def test_beyond_131072_tokens_a_prompt_is_not_looked_at() -> None:
    bench = EppBench("epp_blend")
    head = tuple(range(1310))
    bench.serve(asks(*head), idle("a"))
    assert dict(bench.placed(asks(*head, 5001, 5002), idle("a")).terms)["prefix"] == 1.0
    bench.serve(asks(*range(9000, 9000 + 1310), 1), idle("b"))
    assert dict(bench.placed(asks(*range(9000, 9000 + 1309)), idle("b")).terms)["prefix"] == 1.0


def test_a_prompt_without_a_whole_block_never_sticks() -> None:
    bench = EppBench("epp_sticky")
    bench.send(asks(tokens=60), idle("a"))
    assert bench.placed(asks(tokens=60), idle("a", "b")).backend == "b"
