"""The page on choices: its lines and numbers, the order of candidates, and its limit."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.core.domain import BackendPace, Explained, Learned, Price
from llmproxy.core.snapshot import PoolChoices
from llmproxy.gateway.admin import explained
from llmproxy.gateway.admin.explained import choice_pages, pace_line, price_text, terms_text

TERMS = (("queue", 0.1), ("prefill", 0.27), ("adapter", 0.0), ("harm", 0.04))


def price(backend: str = "gpu-2", terms: tuple[tuple[str, float], ...] = TERMS, **given: Any) -> Price:
    facts: dict[str, Any] = {
        "backend": backend,
        "total_s": sum(seconds for _, seconds in terms),
        "terms": terms,
        "ttft_s": 0.37,
        "tpot_s": 0.0123,
        "cached_tokens": 7_369.6,
        "cold_adapter": False,
        "fits": True,
    }
    return Price(**(facts | given))


def choice(number: int, *prices: Price, chosen: str = "gpu-2") -> Explained:
    return Explained(str(number), f"chat-{number}", "chat", 10.0 + number, 9_200, chosen, prices or (price(),))


def learned(*pace: BackendPace, **given: float) -> Learned:
    facts: dict[str, Any] = {
        "prefill_base_s": 0.03,
        "prefill_token_s": 1 / 15_000,
        "prefill_attention": 2e-5,
        "step_s": 0.0101,
        "sequence_s": 1e-4,
        "adapter_s": 0.05,
        "ttft_p90_factor": 1.5,
        "tpot_p90_factor": 1.25,
        "backends": pace,
    }
    return Learned(**(facts | given))


def page(*choices: Explained, limit: int = 10, wanted: str | None = None) -> dict[str, Any]:
    (shown,) = choice_pages([PoolChoices("base", choices, learned())], 20.0, limit, wanted)
    return shown


def test_a_price_is_readable_without_negligible_parts() -> None:
    assert price_text(price(), 9_200) == (
        "0.41 s = queue 0.10 + prefill 0.27 + harm 0.04; 1,830 of 9,200 tokens uncached"
    )
    assert terms_text(TERMS) == "queue 0.10 + prefill 0.27 + harm 0.04"


def test_a_backend_without_room_says_so() -> None:
    assert price_text(price(terms=(("slot", 1.25),), fits=False), 9_200) == (
        "1.25 s = slot 1.25; 1,830 of 9,200 tokens uncached; takes no request now"
    )


@pytest.mark.parametrize(
    ("terms", "shown"),
    [
        ((("queue", 0.0409), ("harm", 0.0012)), "0.042 s = queue 0.041 + harm 0.001"),
        ((("queue", 0.00409), ("harm", 0.00001)), "0.0041 s = queue 0.0041"),
        ((("late", 1_003.456), ("harm", 0.01)), "1003.47 s = late 1003.46 + harm 0.01"),
        ((("queue", 0.0),), "0.00 s"),
        ((), "0.00 s"),
    ],
)
def test_parts_have_the_same_decimal_places_as_their_sum(terms: tuple[tuple[str, float], ...], shown: str) -> None:
    assert price_text(price(terms=terms), 9_200).partition(";")[0] == shown


def test_candidates_are_the_chosen_one_then_by_price() -> None:
    costs = {"a": 0.5, "b": 0.1, "c": 0.102, "d": 0.3}
    prices = [price(name, (("queue", seconds),)) for name, seconds in costs.items()]
    (shown,) = page(choice(1, *prices, chosen="c"))["choices"]
    assert shown["chosen"] == "c"
    assert [candidate["backend"] for candidate in shown["candidates"]] == ["c", "b", "d", "a"]


def test_numbers_are_beside_the_text() -> None:
    shown = page(choice(1, price(fits=False, cold_adapter=True)))
    (only,) = shown.pop("choices")
    assert shown | {"learned": None} == {"pool": "base", "priced": True, "more": 0, "learned": None}
    (candidate,) = only.pop("candidates")
    assert only == {
        "request": "chat-1",
        "id": "1",
        "model": "chat",
        "age_s": 9.0,
        "prompt_tokens": 9_200,
        "chosen": "gpu-2",
    }
    assert candidate.pop("price").startswith("0.41 s = ")
    assert candidate == {
        "backend": "gpu-2",
        "total_s": pytest.approx(0.41),
        "terms": dict(TERMS),
        "cached_tokens": 7_370,
        "cold_adapter": True,
        "ttft_s": 0.37,
        "tpot_s": 0.0123,
        "fits": False,
    }


def test_the_newest_choices_are_shown_and_the_rest_counted() -> None:
    shown = page(*(choice(number) for number in (5, 4, 3, 2, 1)), limit=2)
    assert [one["id"] for one in shown["choices"]] == ["5", "4"]
    assert shown["more"] == 3


def test_one_request_is_found_by_its_label_and_by_its_id() -> None:
    made = [choice(4), choice(3), choice(4)]
    for wanted in ("chat-4", "4"):
        shown = page(*made, wanted=wanted)
        assert [one["id"] for one in shown["choices"]] == ["4", "4"]
        assert shown["more"] == 0
    assert page(*made, wanted="chat")["choices"] == []


def test_a_page_is_limited_but_shows_at_least_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "PRICES_MAX", 5)
    pair = (price("gpu-1"), price("gpu-2"))
    one, two = PoolChoices("one", (choice(1, *pair),), learned()), [choice(number, *pair) for number in (4, 3, 2)]
    shown = choice_pages([one, PoolChoices("two", tuple(two), learned())], 20.0, 10, None)
    assert [(len(one["choices"]), one["more"]) for one in shown] == [(1, 0), (1, 2)]
    large = tuple(price(f"gpu-{number}") for number in range(9))
    assert [(len(one["choices"]), one["more"]) for one in (page(choice(2, *large), choice(1)),)] == [(1, 1)]


def test_a_pool_without_prices_says_so() -> None:
    (shown,) = choice_pages([PoolChoices("base", (), None)], 20.0, 10, None)
    assert shown.pop("note") == "This placement has no prices; the terms of its choices are in the log."
    assert shown == {"pool": "base", "priced": False, "choices": [], "more": 0, "learned": None}
    assert "note" not in page()


@pytest.mark.parametrize(
    ("prefill", "step", "line"),
    [
        (1.9, 1.0, "prompts 1.9x slower, tokens as the pool"),
        (0.5, 1.04, "prompts 2.0x faster, tokens as the pool"),
        (0.96, 1.25, "prompts as the pool, tokens 1.2x slower"),
    ],
)
def test_pace_is_relative_to_the_pool(prefill: float, step: float, line: str) -> None:
    pace = BackendPace("gpu-3", prefill, step, 0.41, 12, 1_200, 4_000)
    assert pace_line(pace) == (
        f"gpu-3: {line}, 41% busy with prompts, 12 sequences in flight, 1,200 of 4,000 blocks indexed"
    )


def test_learned_values_are_shown_as_numbers() -> None:
    pace = BackendPace("gpu-3", 1.9, 0.5, 0.4111, 12, 1_200, 4_000)
    (shown,) = choice_pages([PoolChoices("base", (), learned(pace))], 20.0, 10, None)
    (backend,) = shown["learned"].pop("backends")
    assert shown["learned"] == {
        "prefill_tokens_per_s": 15_000.0,
        "prefill_attention": 2e-5,
        "prefill_base_s": 0.03,
        "step_s": 0.0101,
        "step_s_per_sequence": 1e-4,
        "adapter_s": 0.05,
        "ttft_p90_factor": 1.5,
        "tpot_p90_factor": 1.25,
    }
    assert backend.pop("line") == pace_line(pace)
    assert backend == {
        "backend": "gpu-3",
        "prefill_factor": 1.9,
        "step_factor": 0.5,
        "busy_share": 0.411,
        "in_flight": 12,
        "indexed_blocks": 1_200,
        "indexed_blocks_max": 4_000,
    }


def test_a_pool_whose_prompts_take_no_time_has_no_rate() -> None:
    (shown,) = choice_pages([PoolChoices("base", (), learned(prefill_token_s=0.0))], 20.0, 10, None)
    assert shown["learned"]["prefill_tokens_per_s"] is None
