"""Every key of the configuration, found by a walk through the schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from llmproxy.config.config import Config
from llmproxy.config.schema.section import Section

FILE_ONLY = frozenset(
    {
        *("plugins", "bands", "models", "objectives", "tenants", "queue.band_max_wait_s"),
        *("scheduling.ceilings", "scheduling.min_shares", "scheduling.weights"),
    }
)
"""Keys outside lists that only a file can set: mappings, lists of sections except `backends`, and `plugins`."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration file. Flags, variables and the reference page are made from keys."""

    # The dotted name, with `[]` for the entries of a list: `models[].target`.
    name: str
    field: FieldInfo
    # The section that contains the key.
    owner: type[Section]
    # The type of the value, or of the entries of a list, if it is a section.
    section: type[Section] | None = None

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        return self.section is not None and self.section is self.field.annotation


def walk(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Yields all keys of a section in the order of the schema. The keys of a subsection follow it."""
    for name, field in section.model_fields.items():
        key = Key(f"{prefix}{field.alias or name}", field, section, next(sections_in(field.annotation), None))
        yield key
        if key.section is not None:
            yield from walk(key.section, f"{key.name}{'.' if key.is_section else '[].'}")


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yields the sections in a type: the type itself, or the types of its entries."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def leaves(top: type[Section]) -> dict[str, FieldInfo]:
    """Maps dotted names to fields, for all keys that are outside lists and are no sections."""
    return {key.name: key.field for key in walk(top) if "[]" not in key.name and not key.is_section}


def keys() -> dict[str, FieldInfo]:
    """Maps dotted names to fields, for the keys that a flag or variable can set, in the order of the schema."""
    return {name: field for name, field in leaves(Config).items() if name not in FILE_ONLY}


def keys_of_files() -> Iterator[str]:
    """Yields the names of keys that only a file can set, such as `models[].target`."""
    for key in walk(Config):
        if key.name in FILE_ONLY or ("[]" in key.name and not key.is_section):
            yield key.name
