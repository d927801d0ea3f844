"""The configuration in force, key by key, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmproxy.config.changes import SECRET, read_at_start, value_text
from llmproxy.config.config import Config
from llmproxy.config.document import Place
from llmproxy.config.schema import Section

DEFAULT = "default"
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """A key of the configuration with its value."""

    key: str
    # As text; `***` for a secret.
    value: str
    # A file with its line, a flag, a variable, or `default`.
    origin: str
    # Whether a change of the key needs a restart.
    restart: bool


def in_force(config: Config) -> list[SettingInForce]:
    """Every key in the order of the schema; entries of lists have their names, as in `backends[gpu-0].url`."""
    return [setting for _, setting in _settings(config, "", (), config.origins)]


def origins_in_force(old: Config, new: Config) -> dict[Place, str]:
    """The origins of `new`, except for values of `old` that stay in force until a restart: these keep their origins."""
    was = dict(_settings(old, "", (), old.origins))
    now = _settings(new, "", (), new.origins)
    kept = {place: was[place].origin for place, one in now if one.restart and was.get(place, one).value != one.value}
    return {**new.origins, **kept}


def _settings(
    value: Any, key: str, place: Place, origins: Mapping[Place, str], given: bool = True
) -> Iterator[tuple[Place, SettingInForce]]:
    """Settings below `value`. `given` is False for a default, which does not inherit the origin of its section."""
    if isinstance(value, Section):
        for name in type(value).model_fields:
            part = f"{key}.{name}".lstrip(".")
            yield from _settings(getattr(value, name), part, (*place, name), origins, name in value.model_fields_set)
    elif isinstance(value, tuple) and value and all(isinstance(one, Section) for one in value):
        for i, one in enumerate(value):
            yield from _settings(one, f"{key}[{getattr(one, 'name', i)}]", (*place, i), origins)
    else:
        text = HIDDEN if value and place[-1] in SECRET else value_text(value)
        ends = range(len(place), 0 if given else len(place) - 1, -1)
        found = (origins[place[:end]] for end in ends if place[:end] in origins)
        yield place, SettingInForce(key, text, next(found, DEFAULT), read_at_start(key))
