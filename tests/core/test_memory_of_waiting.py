"""Requests that waited in a crowd are not kept when later requests never wait."""

from __future__ import annotations

import gc
from dataclasses import replace

from llmproxy.core.domain import CRITICAL, DEFAULT, Grant, Request, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.pools import Pools
from tests.core.make import DEFAULTS, pools, request, submit, tight

CROWD = 500


def kept() -> int:
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())


def serve_all(of: Pools) -> None:
    while granted := [one for one in of.decide(0.0) if isinstance(one, Grant)]:
        for grant in granted:
            of.apply(Returned(grant.lease, Verdict.SERVED), 0.0)
            of.ended(grant.request, None, 0.0)


def test_a_crowd_that_was_served_is_forgotten() -> None:
    one = pools({"a": 1}, tight(queue=replace(DEFAULTS.queue, requests_max=CROWD)))
    before = kept()
    submit(one, *(request(deadline_s=1e6) for _ in range(CROWD)))
    # A full room sorts its requests to shed one.
    submit(one, request(band=CRITICAL))
    assert one.queued()[DEFAULT][0] == CROWD - 1
    serve_all(one)
    for _ in range(2 * CROWD):
        submit(one, request())
        serve_all(one)
    assert kept() - before < CROWD / 2
