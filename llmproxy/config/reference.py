"""Writes a configuration as YAML with the description and type of each key, such as `config.example.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from llmproxy.config.config import Config
from llmproxy.config.schema.section import Section
from llmproxy.config.value_types import TypeName, hash_of

COLUMNS = 120
SAMPLE = {
    "backends": [{"url": "http://localhost:8000"}],
    "models": [{"name": "my-model"}],
    "objectives": [{"name": "interactive", "criticality": "critical", "ttft_s": 0.5}],
    "tenants": [{"name": "acme", "keys": [{"hash": hash_of("acme"), "expires": "2027-01-31"}]}],
}
"""Sample entries for lists that are empty by default, to show the keys of an entry."""
HEAD = """\
# Every key of llmproxy with its default, or with a sample where there is none. Each key outside lists is a flag and a
# variable too: queue.max_wait_s is --queue-max-wait-s and LLMPROXY_QUEUE_MAX_WAIT_S. Only a file can hold mappings,
# plugins, bands and the keys of list entries. A key without a value is null. That is an error, unless the key can be
# null, or is a section, a mapping or a list (except api_keys and tenants), which then has its default.
# `llmproxy check FILE` checks a file.
# Tenants are commented out, because with one tenant or more every request needs a key.

"""


def sample() -> Config:
    """Returns the default configuration, with one entry in each list of sections."""
    return Config.model_validate(SAMPLE)


# --- a configuration as YAML ------------------------------------------------------------------------------------------


def example_file() -> str:
    lines = list(_lines(sample(), "", secrets=True))
    start = lines.index("tenants:")
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    lines[start:end] = ["tenants: []", *(f"#{line}" for line in lines[start + 1 : end])]
    return HEAD + "\n".join(lines) + "\n"


def as_yaml(config: Config) -> str:
    """Formats every key of a configuration as YAML, with its meaning, type and value. Secrets are shown as ***."""
    return "\n".join(_lines(config, "", secrets=False)) + "\n"


def _lines(section: Section, indent: str, *, secrets: bool, comments: bool = True) -> Iterator[str]:
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value, name = getattr(section, name), field.alias or name
        entries = value if isinstance(value, tuple) and any(isinstance(one, Section) for one in value) else ()
        if comments:
            start = f"{indent}# "
            yield from wrap(meaning(field), COLUMNS, initial_indent=start, subsequent_indent=start)
        if isinstance(value, Section):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ", secrets=secrets, comments=comments)
        elif entries:
            yield f"{indent}{name}:"
            for i, entry in enumerate(entries):
                lines = list(_lines(entry, f"{indent}    ", secrets=secrets, comments=comments and not i))
                first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
                lines[first] = f"{indent}  - {lines[first].lstrip()}"
                # The comment of the first key goes above the dash.
                yield from (line.removeprefix("  ") if i < first else line for i, line in enumerate(lines))
        else:
            text = as_text(values[name]) if field.repr or secrets or not value else "'***'"
            comment = f"  # {kind(field)}" if comments else ""
            if len(text) < COLUMNS or not isinstance(value, tuple):
                yield f"{indent}{name}: {text}{comment}"
            else:
                yield f"{indent}{name}:{comment}"
                yield from (f"{indent}  - {as_text(one)}" for one in values[name])


def as_text(value: Any) -> str:
    """Formats a value as YAML in one line."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return yaml.safe_dump(value, default_flow_style=True, width=1e9, sort_keys=False).removesuffix("\n...\n").strip()


# --- a key in words ---------------------------------------------------------------------------------------------------


def meaning(field: FieldInfo) -> str:
    """Returns the description of a key, in one line."""
    return " ".join((field.description or "").split())


BOUNDS = {"ge": ">= {:g}", "gt": "> {:g}", "le": "<= {:g}"}
WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", NoneType: "null"}


def kind(field: FieldInfo) -> str:
    """Describes the type of a key, such as `integer >= 1 or null`."""
    return _kind(field.annotation, field.metadata)


def _kind(annotation: Any, metadata: Iterable[Any]) -> str:
    parts: list[Any] = [part for one in metadata for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
    if named := [part for part in parts if isinstance(part, TypeName)]:
        return named[-1]
    arguments = [argument for argument in get_args(annotation) if argument is not ...]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(arguments[0], [*arguments[1:], *parts])
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument, ()) for argument in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0], ())}"
    if origin is dict:
        return f"mapping of names to {_kind(arguments[1], ())}"
    bounds = [words.format(getattr(part, at)) for part in parts for at, words in BOUNDS.items() if hasattr(part, at)]
    return " ".join([WORDS.get(annotation, "section"), ", ".join(bounds)]).strip()
