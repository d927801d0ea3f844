"""Divides the needed replicas into prefill and decode replicas in a pool with roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil

from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Role
from llmproxy.core.scaling.need import Need, RoleNeed


def prefill_share(need: Need) -> float:
    """Returns the share (0..1) of prompts in the work of a pool. The work must not be 0."""
    return need.prefill / (need.prefill + need.decode)


def by_role(need: Need, views: Iterable[View]) -> Need:
    """Returns `need` with the need of each role. Backends of role `both` count as decode.

    Returns `need` unchanged if no backend of `views` has the role prefill or decode.
    """
    up: Counter[Role] = Counter()
    for view in views:
        up[view.role] += view.available
    if up.keys() <= {Role.BOTH}:
        return need
    answering = up[Role.DECODE] + up[Role.BOTH]
    if need.prefill + need.decode > 0.0:
        prompts = need.need * prefill_share(need)
        prefill, decode = _role(prompts, up[Role.PREFILL]), _role(need.need - prompts, answering)
    else:
        # The need is unknown, so the current replicas are kept.
        prefill, decode = _role(up[Role.PREFILL], up[Role.PREFILL]), _role(answering, answering)
    return replace(need, roles={Role.PREFILL: prefill, Role.DECODE: decode})


def _role(need: float, up: int) -> RoleNeed:
    return RoleNeed(ceil(round(need, 3)), need, up)
