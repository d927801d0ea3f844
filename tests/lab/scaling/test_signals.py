"""Signals of other autoscalers, against their published rules."""

from __future__ import annotations

import pytest

from llmproxy.core.backends.view import View
from llmproxy.lab.scaling.signals import BACKLOG_S, PREFILL_TOKENS_PER_S, SIGNALS, Look


def view(kv_used: float, waiting: int = 0) -> View:
    return View(
        "a", True, frozenset(), frozenset(), None, None, None, 256, 0, waiting, kv_used, 100_000, 0, 0.95, None
    )  # fmt: skip


def look(now: float, views: list[View], asked: int = 2, *, waiting: int = 0, uncached: int = 0, up: int = 2) -> Look:
    return Look(now, up, asked, None, views, waiting, None, 1_000.0, 200.0, uncached)


def test_the_token_aware_one_counts_seconds_of_prompts_or_the_kv_cache() -> None:
    read = SIGNALS["token_aware"].reader()
    backlog = round(3 * BACKLOG_S * PREFILL_TOKENS_PER_S)
    assert read(look(0.0, [view(0.1)], uncached=backlog)) == pytest.approx(3.0)
    assert read(look(0.0, [view(0.8), view(0.8)])) == pytest.approx(2.0)


def test_the_two_sided_one_asks_for_what_is_missing_above_85_percent() -> None:
    read = SIGNALS["wva"].reader()
    # 160,000 tokens are held by two: 150,000 in use and 10 requests of 1,200 are 162,000, over 0.85.
    assert read(look(0.0, [view(0.75), view(0.75)], waiting=10)) == 3.0


def test_it_looks_once_a_minute_and_waits_for_those_that_start() -> None:
    read = SIGNALS["wva"].reader()
    assert read(look(0.0, [view(0.79), view(0.79)])) == 3.0
    assert read(look(30.0, [view(0.0), view(0.0)])) == 3.0
    assert read(look(60.0, [view(0.79), view(0.79)], asked=3)) == 3.0


def test_it_gives_back_what_is_idle_below_70_percent() -> None:
    read = SIGNALS["wva"].reader()
    assert read(look(0.0, [view(0.05)] * 4, asked=4, up=4)) == 1.0


def test_what_engines_held_when_they_were_full_is_their_capacity() -> None:
    read = SIGNALS["wva"].reader()
    # Full with 20,000 tokens: 40,000 in use, 12 waiting of 1,000 in two engines.
    assert read(look(0.0, [view(0.2, waiting=6)] * 2)) == 2.0 + 2.0


def test_readers_share_no_memory() -> None:
    one, other = SIGNALS["wva"].reader(), SIGNALS["wva"].reader()
    one(look(0.0, [view(0.2, waiting=6)] * 2))
    assert other(look(0.0, [view(0.2)] * 2)) == 1.0
