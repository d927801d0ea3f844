"""The number of replicas, at the start of the proxy and while replicas take no requests for a moment."""

from __future__ import annotations

from functools import partial
from itertools import count
from random import Random
from unittest.mock import Mock

from llmproxy.core.domain import Trouble, Usage, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.gateway.admin.scale import ScalePages
from tests.core.make import DEFAULTS, listing, only_grant, pools, request

SOURCE = "dns+http://vllm.svc:8000"


def test_no_number_is_shown_before_each_backend_was_polled() -> None:
    of = Pools(DEFAULTS, dict.fromkeys("abc"), {}, partial(make, "cost", Random(0)))
    pages = ScalePages(of, list, count(1.0).__next__)
    for name in "ab":
        assert pages.needs() == {}
        of.backends[name].answered(1.0)
        of.listed(name, listing())
    of.troubled("c", Trouble.REFUSED)
    assert pages.needs()["base"].desired == 2
    of.add_backend("new", None)
    assert pages.needs()["base"].desired == 2, "a replica that starts hides no number"


def test_a_source_that_never_answers_hides_only_the_present_numbers() -> None:
    """It may hide replicas, so their number is unknown. Without it, a number from the load is right all the same."""
    of, now = pools({"a": 8, "b": 8}), 0.0
    of.catalogue.expecting = {SOURCE}
    pages = ScalePages(of, list, lambda: now)
    page, one = pages.page("/scale"), pages.page("/scale/base")
    assert page is not None
    assert one is not None
    for path, answer in (("/scale", page), ("/scale/base", one)):
        refused = answer(Mock(path=path))
        assert refused.status == 503
        assert f"`{SOURCE}`" in (refused.text or "")
    of.submit(request(), now)
    assert pages.needs() == {}, "a request that is about to be placed says nothing of the number of replicas"
    grant = only_grant(of, now)
    now = 1.0
    of.apply(Returned(grant.lease, Verdict.SERVED, Usage(1_000, 100)), now)
    assert pages.needs() == {}
    now += DEFAULTS.scaling.idle_s
    assert (pages.needs()["base"].reason, one(Mock(path="/scale/base")).status) == ("min", 200)


def test_a_source_that_never_answers_hides_no_number_from_the_load() -> None:
    of, now = pools({"a": 8, "b": 8}), 0.0
    of.catalogue.expecting = {SOURCE}
    pages = ScalePages(of, list, lambda: now)
    for _ in range(60):
        of.submit(request(), now)
        grant = only_grant(of, now)
        now += 1.0
        of.apply(Returned(grant.lease, Verdict.SERVED, Usage(1_000, 100)), now)
    found = pages.needs()["base"]
    assert (found.sure, found.desired) == (True, 1)


def test_a_replica_that_is_busy_for_a_moment_still_counts() -> None:
    of = pools({"a": 8, "b": 8})
    of.submit(request(), 0.0)
    grant = only_grant(of, 0.0)
    of.apply(Returned(grant.lease, Verdict.BUSY), 0.1)
    assert not of.views(0.1)[grant.placed.backend].available
    assert of.needs(0.1)["base"].desired == 2
    of.backends["a"].drained = True
    assert of.needs(0.1)["base"].desired == 1
