"""Words of other routers and of vLLM itself that people use here, and what to write instead of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True, slots=True)
class Words:
    """What `other_routers.yaml` holds.

    `flags` has a pattern, the program it belongs to, and what to write instead; the first pattern that fits counts.
    `placements` leads from a policy of another router to the nearest placement.
    """

    flags: tuple[tuple[str, str, str], ...]
    placements: Mapping[str, str]


@cache
def table() -> Words:
    """Read the file, at the first word that is not known."""
    data = yaml.safe_load(files(__package__).joinpath("other_routers.yaml").read_text())
    flags = ((pattern, row["of"], row["instead"]) for row in data["flags"] for pattern in row["flags"].split())
    placements = {name: nearest for nearest, names in data["placements"].items() for name in names.split()}
    return Words(tuple(flags), placements)


def nearest_placement(name: str) -> str | None:
    """The placement that is nearest to a policy of another router, None where the name is unknown."""
    return table().placements.get(name.lower().replace("-", "_"))


def replacement_for(flag: str) -> str | None:
    """What to write instead of a flag of another program, None where the flag is unknown."""
    for pattern, program, instead in table().flags:
        if fnmatchcase(flag, pattern):
            return f"is a setting of {program}; here: {instead}"
    return None
