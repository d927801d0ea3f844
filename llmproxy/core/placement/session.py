"""Session affinity: the requests of a session go to one backend unless its load is far above the mean."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from xxhash import xxh64_intdigest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.core.placement.policy import Pick, picking
from llmproxy.core.placement.simple import least_request

BOUND = 1.25  # Highest saturation of a backend as a multiple of the mean saturation: 1 + epsilon of the paper.
IDLE = 0.125
"""A backend below this saturation is never too busy. A few requests slow nothing down, but a session that moves because
of them loses its cached prompts: a sixth of the hits in the laboratory, with one request per backend."""


@picking("session")
def session(rng: Random) -> Pick:
    """Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
    "Consistent hashing with bounded loads", 2018). A request without a session goes to the least loaded backend.

    Every backend has a weight for every session, the same in every process. A session goes to the backend with the
    highest weight among the backends with a free slot and a saturation below `IDLE`, or below `BOUND` times the mean
    (with this request). Such a backend always exists, because not all can be above their mean. If a backend leaves,
    only its own sessions move, each to its next backend, and return when the backend does.
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
