"""Keys that have a new name. The old one works for one release; `check` and the log say what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Renamed:
    """The key that takes the place of an old one, and the release that renamed it."""

    key: str
    since: str


OLD_KEYS: Mapping[str, Renamed] = {
    "scheduling.withdrawal": Renamed("scheduling.preemption", since="0.2"),
    "scheduling.reserve_s": Renamed("scheduling.headroom_s", since="0.2"),
}
"""Dotted keys outside lists. A row is all that a renamed key needs: it is taken under both names in files, flags,
variables and parameters of simulated policies; both names at once are an error."""


def advice(key: str, instead: str) -> str:
    """What to tell somebody who used an old name of `key`, for which `instead` is to be written."""
    since = next(renamed.since for renamed in OLD_KEYS.values() if renamed.key == key)
    return f"is the old name of {key} since {since} and works for one release; write {instead}"


def current(key: str) -> str:
    """The name that a dotted key has today."""
    return OLD_KEYS[key].key if key in OLD_KEYS else key
