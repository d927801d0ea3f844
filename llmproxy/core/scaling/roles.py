"""Divides the needed replicas into prefill and decode replicas in a pool with roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil, floor

from msgspec import Struct
from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Role
from llmproxy.core.scaling.need import Need, RoleNeed


class Ratio(Struct, frozen=True):
    """The load of a pool from prompts and from answers, both in replicas. At least one of them is above 0."""

    prefill: float
    decode: float

    @property
    def share(self) -> float:
        """The share of prompts in the load, 0..1."""
        return self.prefill / (self.prefill + self.decode)

    def prefill_replicas(self, replicas: int) -> int:
        """Returns how many of `replicas` (at least 2) should be prefill replicas."""
        return min(replicas - 1, max(1, floor(replicas * self.share + 0.5)))


def apart(need: Need, views: Iterable[View]) -> Need:
    """Returns `need` with the need of each role. If all roles are `both`, returns `need` unchanged; in other pools,
    `both` counts as decode.
    """
    up: Counter[Role] = Counter()
    for view in views:
        up[view.role] += view.available
    if up.keys() <= {Role.BOTH}:
        return need
    answering = up[Role.DECODE] + up[Role.BOTH]
    if need.prefill + need.decode > 0.0:
        prompts = need.need * Ratio(need.prefill, need.decode).share
        prefill, decode = _role(prompts, up[Role.PREFILL]), _role(need.need - prompts, answering)
    else:
        # The need is unknown, so the current replicas are kept.
        prefill, decode = _role(up[Role.PREFILL], up[Role.PREFILL]), _role(answering, answering)
    return replace(need, roles={Role.PREFILL: prefill, Role.DECODE: decode})


def _role(need: float, up: int) -> RoleNeed:
    return RoleNeed(ceil(round(need, 3)), need, up)
