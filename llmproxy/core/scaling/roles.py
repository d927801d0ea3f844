"""Divides the needed replicas into prefill and decode replicas in a pool with roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil

from msgspec.structs import replace

from llmproxy.core.domain import Role
from llmproxy.core.scaling.need import Need, ReplicaFacts, RoleNeed


def prefill_share(need: Need) -> float:
    """Returns the share (0..1) of prompts in the work of a pool. The work must not be 0."""
    return need.prefill / (need.prefill + need.decode)


def by_role(need: Need, replicas: Iterable[ReplicaFacts]) -> Need:
    """Returns `need` with the need of each role. Replicas of role `both` count as decode.

    Returns `need` unchanged if none of `replicas` has the role prefill or decode.
    """
    up: Counter[Role] = Counter()
    known: Counter[Role] = Counter()
    for one in replicas:
        up[one.role] += one.up
        known[one.role] += 1
    if known.keys() <= {Role.BOTH}:
        return need
    if need.prefill + need.decode > 0.0:
        share = prefill_share(need)
    else:
        # The work of prompts and answers is unknown, as in an idle pool, so the present shares are kept.
        present = up if up.total() else known
        share = present[Role.PREFILL] / present.total()
    prefill = _role(need.need * share, up[Role.PREFILL])
    decode = _role(need.need * (1.0 - share), up[Role.DECODE] + up[Role.BOTH])
    return replace(need, roles={Role.PREFILL: prefill, Role.DECODE: decode})


def _role(need: float, up: int) -> RoleNeed:
    return RoleNeed(ceil(round(need, 3)), need, up)
