"""How many replicas for prompts and how many for answers, where a pool has roles."""

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
    """The work of a pool for prompts and for answers, both in replicas; one of them is above 0."""

    prefill: float
    decode: float

    @property
    def share(self) -> float:
        """The part of the replicas that prompts need, 0..1."""
        return self.prefill / (self.prefill + self.decode)

    def prefill_replicas(self, replicas: int) -> int:
        """How many of so many replicas, which are at least two, should be for prompts."""
        return min(replicas - 1, max(1, floor(replicas * self.share + 0.5)))


def apart(need: Need, views: Iterable[View]) -> Need:
    """The same need, with that of each role where a pool has roles. Backends that may do both count as for answers."""
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
        # What is not known is not idle.
        prefill, decode = _role(up[Role.PREFILL], up[Role.PREFILL]), _role(answering, answering)
    return replace(need, roles={Role.PREFILL: prefill, Role.DECODE: decode})


def _role(need: float, up: int) -> RoleNeed:
    return RoleNeed(ceil(round(need, 3)), need, up)
