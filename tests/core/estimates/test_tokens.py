from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.domain import RequestFacts, Usage
from llmproxy.core.estimates import tokens as estimate
from llmproxy.core.estimates.tokens import Estimator, believable, usage_max


def test_before_any_answer_the_defaults_hold() -> None:
    assert Estimator().tokens("m", RequestFacts("m", prompt_bytes=400)) == (100, 256)


def test_token_ids_are_exact_and_max_tokens_bounds_each_sequence() -> None:
    estimator = Estimator()
    assert estimator.tokens("m", RequestFacts("m", prompt_bytes=999, prompt_tokens=7, max_tokens=5, sequences=3)) == (
        7,
        15,
    )
    assert estimator.tokens("m", RequestFacts("m", max_tokens=-1)) == (1, 0)


def test_the_first_answer_counts_in_full_and_later_ones_are_averaged() -> None:
    estimator = Estimator()
    estimator.learn("m", 300, 1, Usage(100, 50))
    assert estimator.tokens("m", RequestFacts("m", prompt_bytes=600)) == (200, 50)
    estimator.learn("m", 500, 1, Usage(100, 150))
    assert estimator.tokens("m", RequestFacts("m", prompt_bytes=400)) == (100, 100)
    assert estimator.tokens("other", RequestFacts("other", prompt_bytes=400)) == (100, 256)


def test_bytes_per_token_are_reported_as_learned() -> None:
    estimator = Estimator()
    estimator.learn("m", 300, 1, Usage(100, 50))
    assert (estimator.bytes_per_token("m"), estimator.bytes_per_token("other")) == (3.0, estimate.BYTES_PER_TOKEN)


def test_a_steady_change_is_followed_for_ever() -> None:
    estimator = Estimator()
    for _ in range(200):
        estimator.learn("m", 400, 1, Usage(100, 10))
    for _ in range(100):
        estimator.learn("m", 200, 1, Usage(100, 1000))
    prompt, output = estimator.tokens("m", RequestFacts("m", prompt_bytes=400))
    assert prompt == pytest.approx(200, rel=0.02)
    assert output == pytest.approx(1000, rel=0.02)


def test_sequences_share_one_usage_and_exact_prompts_teach_no_ratio() -> None:
    estimator = Estimator()
    estimator.learn("m", None, 4, Usage(100, 400))
    assert estimator.tokens("m", RequestFacts("m", prompt_bytes=400)) == (100, 100)


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(10_000_000, 1), (1, 10_000_000)])
def test_an_absurd_ratio_is_bounded(prompt_bytes: int, tokens: int) -> None:
    estimator = Estimator()
    estimator.learn("m", prompt_bytes, 1, Usage(tokens, 1))
    prompt, _ = estimator.tokens("m", RequestFacts("m", prompt_bytes=6400))
    assert 100 <= prompt <= 25_600


def test_the_least_recently_taught_model_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "MODELS_MAX", 2)
    estimator = Estimator()
    for model in ("old", "kept", "old", "new"):
        estimator.learn(model, 100, 1, Usage(100, 7))
    assert estimator.tokens("old", RequestFacts("old", prompt_bytes=100))[1] == 7
    assert estimator.tokens("new", RequestFacts("new", prompt_bytes=100))[1] == 7
    assert estimator.tokens("kept", RequestFacts("kept", prompt_bytes=100))[1] == 256


def test_estimate_from_another_process_is_used_and_updated() -> None:
    one, other = Estimator(), Estimator()
    one.learn("m", 300, 1, Usage(100, 50))
    other.take("m", replace(one.models["m"]))
    assert other.tokens("m", RequestFacts("m", prompt_bytes=600)) == (200, 50)
    other.learn("m", 500, 1, Usage(100, 150))
    assert (other.models["m"].seen, one.models["m"].seen) == (2, 1)


def test_routes_that_generate_nothing_teach_no_answer_length() -> None:
    estimator = Estimator()
    estimator.learn("m", 300, None, Usage(100, 0))
    assert estimator.tokens("m", RequestFacts("m", prompt_bytes=600)) == (200, 256)


@pytest.mark.parametrize(
    ("ask", "context_tokens", "sequences", "most"),
    [
        (RequestFacts("m", prompt_bytes=1), 4096, 1, Usage(4096, 4096)),
        (RequestFacts("m", prompt_bytes=1, max_tokens=16), 4096, 1, Usage(4096, 16)),
        (RequestFacts("m", prompt_bytes=1, max_tokens=10**18), 4096, 1, Usage(4096, 4096)),
        (RequestFacts("m", prompt_bytes=1, max_tokens=16, sequences=3), 4096, 6, Usage(6 * 4096, 6 * 16)),
        (RequestFacts("m", prompt_bytes=100), None, 1, Usage(400 + 65536, 1 << 24)),
        (RequestFacts("m", prompt_tokens=100, max_tokens=10**18), None, 1, Usage(100 + 65536, 1 << 24)),
        (RequestFacts("m", prompt_bytes=1), 1 << 63, 1, Usage(1 << 24, 1 << 24)),
    ],
)
def test_usage_beyond_the_possible_is_not_believed(
    ask: RequestFacts, context_tokens: int | None, sequences: int, most: Usage
) -> None:
    assert usage_max(ask, context_tokens, sequences) == most
    assert believable(most, most) == most
    assert believable(Usage(most.prompt_tokens + 1, 0), most) is None
    assert believable(Usage(0, most.output_tokens + 1), most) is None
    assert believable(Usage(-1, 0), most) is None
    assert believable(Usage(0, -1), most) is None


@pytest.mark.parametrize("cached", [-1, 11, 10**400])
def test_a_count_of_cached_tokens_that_cannot_be_is_left_out(cached: int) -> None:
    assert believable(Usage(10, 5, cached), Usage(10, 5)) == Usage(10, 5)
    assert believable(Usage(10, 5, 10), Usage(10, 5)) == Usage(10, 5, 10)
