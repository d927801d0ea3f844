"""Session affinity: the requests of one session go to one backend, as long as it is not busier than its share."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from xxhash import xxh64_intdigest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.core.placement.policy import Pick, picking
from llmproxy.core.placement.simple import least_request

BOUND = 1.25
"""Load that a backend may have for its size, over the mean: 1 + epsilon of the paper."""
IDLE = 0.125
"""Saturation below which a backend is never too busy. A few requests more or less slow nobody down, and moved for them
sessions would lose their cached prompts: in the laboratory a sixth of the hits, with one request per backend."""


@picking("session")
def session(rng: Random) -> Pick:
    """Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
    "Consistent hashing with bounded loads", 2018); a request without a session goes where the load is least.

    Every backend has a weight for every session, which is the same in every process. A session goes to the heaviest
    backend with room whose saturation is below `BOUND` times that of all with room together, this request included, or
    below `IDLE`. One always is: not all can be above their mean. A backend that leaves thus moves its own sessions
    alone, each to the next in its order, and they come back with it.
    """
    without = least_request(rng)

    def pick(request: Request, views: Sequence[View]) -> Placed:
        if request.session is None:
            return without(request, views)
        load = sum(view.load for view in views) + request.sequences
        bound = max(IDLE, BOUND * load / sum(view.limit for view in views))
        key = request.session.encode() + b"\0"
        order = sorted(views, key=lambda view: xxh64_intdigest(key + view.backend.encode()), reverse=True)
        rank, view = next((rank, view) for rank, view in enumerate(order) if view.saturation < bound)
        return Placed(view.backend, -rank, (("rank", rank), ("load", view.saturation)), len(views))

    return pick
