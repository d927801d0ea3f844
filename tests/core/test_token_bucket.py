from __future__ import annotations

from math import inf

from llmproxy.core.token_bucket import TokenBucket


def test_a_bucket_is_full_at_first_and_refills_up_to_its_capacity() -> None:
    bucket = TokenBucket(4.0, 2.0)
    assert [bucket.try_take(1.0, 10.0) for _ in range(5)] == [True] * 4 + [False]
    assert bucket.wait_s(1.0, 10.0) == 0.5
    assert [bucket.try_take(1.0, 10.5) for _ in range(2)] == [True, False]
    assert bucket.level(99.0) == 4.0


def test_an_amount_above_capacity_needs_a_full_bucket_and_leaves_debt() -> None:
    bucket = TokenBucket(4.0, 2.0)
    bucket.take(1.0, 0.0)
    assert bucket.wait_s(100.0, 0.0) == 0.5
    bucket.take(100.0, 0.5)
    assert (bucket.level(0.5), bucket.wait_s(1.0, 0.5)) == (-96.0, 48.5)


def test_returned_tokens_fill_at_most_the_capacity() -> None:
    bucket = TokenBucket(4.0, 0.0)
    bucket.take(3.0, 0.0)
    bucket.take(-1.0, 9.0)
    assert (bucket.level(9.0), bucket.wait_s(3.0, 9.0)) == (2.0, inf)
    bucket.take(-9.0, 9.0)
    assert bucket.level(9.0) == 4.0


def test_resized_bucket_keeps_the_taken_tokens() -> None:
    bucket = TokenBucket(60.0, 1.0)
    bucket.take(40.0, 0.0)
    bucket.resize(30.0, 0.5, 10.0)
    assert bucket.level(10.0) == 0.0
    assert bucket.wait_s(1.0, 10.0) == 2.0


def test_a_client_that_comes_when_due_does_not_wait_again() -> None:
    bucket = TokenBucket(0.1, 0.1)
    bucket.take(0.1, 0.0)
    for step in range(1, 10_000):
        bucket.level(step / 10_000)
    assert bucket.wait_s(0.1, 1.0) == 0.0
