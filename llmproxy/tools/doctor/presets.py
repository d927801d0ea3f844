"""The keys that matter for a kind of work, each with a figure from the laboratory. Every other key keeps its default.

`docs/how-to/configure.md` has the commands that repeat the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class Setting(Struct, frozen=True):
    """A key of the configuration, its value, and the reason for the value."""

    key: str
    value: Any
    why: str


class Preset(Struct, frozen=True):
    """The settings for a kind of work."""

    settings: tuple[Setting, ...] = ()
    # The keys that each model of the replicas gets under `models`, and the reason.
    model: Mapping[str, float] = {}
    model_why: str = ""


PRESETS: Mapping[str, Preset] = {
    "chat": Preset(
        model={"ttft_s": 1.0, "tpot_s": 0.04},
        model_why="People wait for these answers. Conversations at 1.1 times the capacity: 56 % of the answers in time"
        " with objectives, 27 % without; late answers come later.",
    ),
    "batch": Preset(
        (
            Setting(
                "queue.max_wait_s",
                86_400.0,
                "A day. Of 6,000 requests at once on one replica, none is refused, and 80 % with the default of 60 s.",
            ),
        )
    ),
    "rollout": Preset(
        (
            Setting(
                "queue.max_wait_s",
                3_600.0,
                "An hour. After an update of 90 s, 17 % of the requests are refused with the default of 60 s. Late"
                " answers are the price: 51 % of all come in time, and 57 % with the defaults.",
            ),
            Setting(
                "queue.no_backend_wait_s",
                600.0,
                "While weights are updated, no replica is up. With both keys, an update of 90 s refuses no request, and"
                " with the defaults 29 %.",
            ),
        )
    ),
    "agents": Preset(
        (
            Setting(
                "scheduling.flow",
                "tenant",
                "Shares by tenant (`llmproxy hash-key --new` makes a key for `tenants`). While one tenant sends ten"
                " times its share, 99.9 % of the others' answers are in time, and at most 25 % without shares.",
            ),
        )
    ),
}
