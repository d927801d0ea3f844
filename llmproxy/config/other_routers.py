"""Flags and policies of other routers and of vLLM, with their replacements here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True, slots=True)
class Words:
    """The content of `other_routers.yaml`."""

    # Pattern of a flag, its program, and the replacement. The first matching pattern counts.
    flags: tuple[tuple[str, str, str], ...]
    # Policy of another router -> nearest placement.
    placements: Mapping[str, str]


@cache
def table() -> Words:
    """Read the file, at the first unknown word."""
    data = yaml.safe_load(files(__package__).joinpath("other_routers.yaml").read_text())
    flags = ((pattern, row["of"], row["instead"]) for row in data["flags"] for pattern in row["flags"].split())
    placements = {name: nearest for nearest, names in data["placements"].items() for name in names.split()}
    return Words(tuple(flags), placements)


def nearest_placement(name: str) -> str | None:
    """The placement nearest to a policy of another router, None if the policy is unknown."""
    return table().placements.get(name.lower().replace("-", "_"))


def replacement_for(flag: str) -> str | None:
    """Advice for a flag of another program, None if the flag is unknown."""
    for pattern, program, instead in table().flags:
        if fnmatchcase(flag, pattern):
            return f"is a setting of {program}; here: {instead}"
    return None
