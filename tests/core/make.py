"""Makes requests, listings, readings, views, and pools whose backends are up, with defaults for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest

from llmproxy.config import Config, settings_of
from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, Drop, Grant, Listing, ModelCard, Reading, Refused, Request, Trouble, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.placement.policy import Placement, make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings

BASE = "base"
DEFAULTS = settings_of(Config())
"""The settings of an empty configuration."""
_serial = count(1)


def request(**given: Any) -> Request:
    facts: dict[str, Any] = {
        "id": f"r{next(_serial)}", "pool": BASE, "model": given.get("adapter") or BASE, "adapter": None,
        "band": DEFAULT, "flow": "flow", "arrived_s": 0.0, "deadline_s": 60.0, "body_bytes": 100, "prompt_tokens": 10,
        "output_tokens": 10,
    }  # fmt: skip
    return Request(**(facts | given))


def listing(*adapters: str, base: str = BASE, max_model_len: int | None = 4096, at_s: float = 0.0) -> Listing:
    cards = [ModelCard(base, None, max_model_len), *(ModelCard(name, base, None) for name in adapters)]
    return Listing(at_s, tuple(cards))


def reading(at_s: float = 0.0, **given: Any) -> Reading:
    return Reading(taken_at_s=at_s, **given)


def view(name: str = "a", **given: Any) -> View:
    facts: dict[str, Any] = {
        "backend": name, "available": True, "served": frozenset({BASE}), "resident": frozenset(), "max_adapters": None,
        "max_model_len": 4096, "prompt_range": None, "limit": 10, "load": 0, "waiting": 0, "kv_used": 0.0,
        "kv_tokens": None, "look_ahead": 0, "kv_full_ratio": 0.95, "reading": None,
    }  # fmt: skip
    return View(**(facts | given))


def tight(**given: Any) -> Settings:
    """Returns settings without look-ahead and without a bound on prefills."""
    return replace(DEFAULTS, capacity=replace(DEFAULTS.capacity, look_ahead=0, prompt_window_s=None), **given)


def pools(
    backends: Mapping[str, int | None],
    settings: Settings | None = None,
    aliases: Mapping[str, str] | None = None,
    listings: Mapping[str, Listing] | None = None,
    placements: Callable[[], Placement] | None = None,
) -> Pools:
    """Returns pools whose backends are up and serve BASE, unless `listings` has another listing."""
    settings = settings or DEFAULTS
    made = Pools(settings, backends, aliases or {}, placements or partial(make, settings.placement, Random(0)))
    for name in backends:
        made.backends[name].answered(0.0)
        made.listed(name, (listings or {}).get(name, listing()))
    return made


def submit(of: Pools, *requests: Request, now: float = 0.0) -> None:
    for one in requests:
        of.submit(one, now)


def refusal(call: Callable[..., object], *given: Any, **named: Any) -> Refused:
    """Returns the refusal that a call raises."""
    with pytest.raises(Refused) as caught:
        call(*given, **named)
    return caught.value


def kill(of: Pools, backend: str) -> None:
    """Refuses two polls, which proves that the process of `backend` is gone."""
    for _ in range(2):
        of.troubled(backend, Trouble.REFUSED)


def grants(of: Pools, now: float = 0.0) -> list[Grant]:
    """Returns the grants of the next pass."""
    decisions = of.decide(now)
    of.check(now)
    return [decision for decision in decisions if isinstance(decision, Grant)]


def granted(of: Pools, now: float = 0.0) -> list[Grant]:
    """Returns the decisions of the next pass, which must all be grants and must leave none to the pass after it."""
    decisions = of.decide(now)
    of.check(now)
    assert of.decide(now) == []
    grants = [decision for decision in decisions if isinstance(decision, Grant)]
    assert len(grants) == len(decisions), "something else was decided, too"
    return grants


def names(grants: Sequence[Grant]) -> list[str]:
    """Returns the request ids of grants."""
    return [grant.request.id for grant in grants]


def one_by_one(of: Pools, held: Grant, now: float) -> list[str]:
    """Returns the requests that are granted the only slot one after the other, after `held` is served."""
    served: list[Grant] = []
    of.apply(Returned(held.lease, Verdict.SERVED), now)
    while found := grants(of, now):
        served += found
        of.apply(Returned(served[-1].lease, Verdict.SERVED), now)
    return names(served)


def only_drop(of: Pools, now: float) -> Drop:
    """Returns the only decision of the next pass, which must be a drop."""
    (drop,) = of.decide(now)
    assert isinstance(drop, Drop)
    return drop


def only_grant(of: Pools, now: float) -> Grant:
    """Returns the only decision of the next pass, which must be a grant."""
    (grant,) = of.decide(now)
    assert isinstance(grant, Grant)
    return grant


def cached(of: Pools, grant: Grant, hashes: Sequence[int]) -> None:
    """Notes the blocks of the prompt and the answer of `grant`."""
    of.cached(grant.request.pool, grant.lease, grant.placed.backend, hashes)
