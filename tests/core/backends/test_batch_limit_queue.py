"""Engine queues with other causes than the batch, and the initial batch limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Grant, KnownLimit, Stage
from llmproxy.core.pools import Pools
from tests.core.make import BASE, DEFAULTS, listing, pools, reading, request, submit


def queued_inside(*, used: int | None) -> Pools:
    """Two backends with room; "a" has a waiting sequence, and the band `used` was in use recently."""
    of = pools({"a": 20, "b": 20}, replace(DEFAULTS, ceilings={SHEDDABLE: 1.0}))
    if used is not None:
        of.submit(request(id="before", band=used), 1.0)
        of.decide(1.0)
    of.backends["a"].observe(reading(1.0, running=4, waiting=1))
    of.backends["b"].observe(reading(1.0, running=5, waiting=0))
    return of


def went(of: Pools, band: int, count: int = 6) -> set[str]:
    submit(of, *(request(band=band, arrived_s=1.1) for _ in range(count)), now=1.1)
    return {one.placed.backend for one in of.decide(1.1) if isinstance(one, Grant)}


@pytest.mark.parametrize(
    ("used", "band", "where"),
    [
        (CRITICAL, SHEDDABLE, {"b"}),
        (DEFAULT, SHEDDABLE, {"b"}),
        (CRITICAL, -1, {"b"}),
        (CRITICAL, DEFAULT, {"a", "b"}),
        (None, SHEDDABLE, {"a", "b"}),
    ],
)
def test_low_bands_are_not_sent_to_an_engine_with_a_queue(used: int | None, band: int, where: set[str]) -> None:
    assert went(queued_inside(used=used), band) == where


def test_low_band_waits_while_every_engine_has_a_queue() -> None:
    of = queued_inside(used=CRITICAL)
    of.backends["b"].observe(reading(1.05, running=5, waiting=2))
    assert went(of, SHEDDABLE) == set()
    of.backends["a"].observe(reading(1.2, running=5, waiting=0))
    assert {one.placed.backend for one in of.decide(1.3) if isinstance(one, Grant)} == {"a"}


# --- sequences that wait for other reasons ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "deferred", "queue"), [(Stage.DECODE, 4, False), (Stage.DECODE, 0, True), (Stage.WHOLE, 4, True)]
)
def test_only_answers_that_fetch_their_prompts_are_no_queue_of_the_engine(
    stage: Stage, deferred: int, queue: bool
) -> None:
    """Four requests are in the engine's queue; `deferred` of them wait for KV blocks."""
    one = backend()
    for lease in range(4):
        one.book(lease, request(stage=stage, stream=True), 0.0)
    for at_s in (1.0, 1.2, 1.4, 1.6):
        one.observe(reading(at_s, running=1, waiting=4, deferred=deferred, kv_used=0.1, kv_tokens=10_000))
    assert (one.view(1.7).waiting, one.limit.converged) == ((4, True) if queue else (0, False))


# --- initial batch limits -------------------------------------------------------------------------------------------

KNOWN = KnownLimit(12, True, (BASE,), 4096)


def backend(known: KnownLimit | None = None, max_in_flight: int | None = None) -> Backend:
    made = Backend("a", replace(DEFAULTS.capacity, initial_batch_limit=4), DEFAULTS.health, max_in_flight)
    if known is not None:
        made.restore(known)
    made.listed(listing("x", max_model_len=4096))
    return made


def test_a_limit_that_another_process_learned_counts_after_the_listing_too() -> None:
    one = backend()
    assert one.view(0.0).limit == 4
    one.restore(KNOWN)
    assert one.view(0.0).limit == 12
    one = backend()
    one.restore(KnownLimit(12, True, ("other",), 4096))
    assert one.limit.value == 4


@pytest.mark.parametrize(
    ("known", "limit"),
    [
        (KNOWN, 12),
        (None, 4),
        (KnownLimit(12, True, ("other",), 4096), 4),
        (KnownLimit(12, True, (BASE,), 1024), 4),
        (KnownLimit(12, True, ()), 4),
    ],
)
def test_only_a_restored_limit_of_the_same_engine_counts(known: KnownLimit | None, limit: int) -> None:
    assert backend(known).limit.value == limit


def test_configured_limit_goes_before_a_restored_or_published_one() -> None:
    one = backend(KNOWN, max_in_flight=7)
    one.published(12)
    assert one.limit.value == 7


def test_gauges_overrule_a_restored_limit_in_both_directions() -> None:
    one = backend(KNOWN)
    for at_s in (1.0, 1.2, 1.4):
        one.observe(reading(at_s, running=5, waiting=3))
    assert one.limit.value == 5
    one = backend(KNOWN)
    one.observe(reading(1.0, running=20, waiting=0))
    assert one.limit.value == 20


def test_unconverged_restored_limit_goes_on_growing() -> None:
    one = backend(KnownLimit(40, False, (BASE,), 4096))
    assert one.limit.value == 40
    one.limit.observe(running=40, waiting=0, load=40)
    assert one.limit.value == 80


def test_published_limit_goes_before_a_restored_one_not_before_gauges() -> None:
    one = backend(KNOWN)
    one.published(16)
    assert one.limit.value == 16
    for at_s in (1.0, 1.2, 1.4):
        one.observe(reading(at_s, running=5, waiting=3))
    one.published(16)
    assert one.limit.value == 5
    # The engine was restarted with other options.
    one.published(24)
    assert one.limit.value == 24


def test_another_process_or_model_behind_the_name_forgets_the_limit() -> None:
    one = backend(KNOWN)
    one.replaced()
    assert one.limit.value == 4
    one = backend(KNOWN)
    one.listed(listing(base="other", max_model_len=4096))
    assert one.limit.value == 4


def test_only_a_learned_limit_is_known_to_a_later_process() -> None:
    assert backend().known_limit is None
    assert backend(max_in_flight=7).known_limit is None
    one = backend()
    one.observe(reading(1.0, running=9, waiting=0))
    assert one.known_limit == KnownLimit(9, False, (BASE,), 4096)
    one = backend(KNOWN)
    one.observe(reading(1.0))
    assert one.known_limit == KNOWN
