"""The number of replicas, at the start of the proxy and while replicas take no requests for a moment."""

from __future__ import annotations

from functools import partial
from random import Random

from llmproxy.core.domain import Trouble, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.gateway.admin.scale import ScalePages
from tests.core.make import DEFAULTS, listing, only_grant, pools, request


def test_no_number_is_shown_before_each_backend_was_polled() -> None:
    of = Pools(DEFAULTS, dict.fromkeys("abc"), {}, partial(make, "cost", Random(0)))
    pages = ScalePages(of, list, lambda: 1.0)
    for name in "ab":
        assert pages.needs() == {}
        of.backends[name].answered(1.0)
        of.listed(name, listing())
    of.troubled("c", Trouble.REFUSED)
    assert pages.needs()["base"].desired == 2
    of.add_backend("new", None)
    assert pages.needs()["base"].desired == 2, "a replica that starts hides no number"


def test_a_replica_that_is_busy_for_a_moment_still_counts() -> None:
    of = pools({"a": 8, "b": 8})
    of.submit(request(), 0.0)
    grant = only_grant(of, 0.0)
    of.apply(Returned(grant.lease, Verdict.BUSY), 0.1)
    assert not of.views(0.1)[grant.placed.backend].available
    assert of.needs(0.1)["base"].desired == 2
    of.backends["a"].drained = True
    assert of.needs(0.1)["base"].desired == 1
