"""Reads a configuration. All problems are reported at once, each with its file, line and key."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmproxy.config.changes import SECRET
from llmproxy.config.config import Config
from llmproxy.config.document import REMOVED_KEYS, ConfigError, Document, Place, advice, dotted
from llmproxy.config.idle import find_idle
from llmproxy.config.keys import keys, leaves, sections_in, walk
from llmproxy.config.schema.backends import BackendConfig, BackendsFile
from llmproxy.config.schema.section import Section, may_be_null

NULLS = frozenset({"null", "none"})  # Texts for null in flags and variables of keys that may be null; case is ignored.

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Override:
    """A value that replaces the value in the file."""

    # The dotted key that is set, such as `queue.max_wait_s`.
    key: str
    value: str | list[str]
    # The flag or variable that sets the key, for messages.
    origin: str
    # The new name, if `origin` is an old name.
    instead: str = ""


def load(path: Path | None = None, overrides: Sequence[Override] = ()) -> Config:
    """Loads the file at `path`. `overrides` replace its values, and later overrides replace earlier ones.

    Raises ConfigError with all problems. A replaced value is not checked.
    """
    document = Document(path)
    origins: dict[Place, str] = {}
    nullable = {key for key, field in keys().items() if may_be_null(field)}
    for override in overrides:
        place: Place = tuple(override.key.split("."))
        null = override.key in nullable and isinstance(override.value, str) and override.value.lower() in NULLS
        if _set_value(document.values, place, None if null else override.value):
            origins[place] = override.origin
    config = validated(Config, document, origins)
    warnings = [f"{document.at(line)}: {warning}" for line, warning in document.old_names()]
    warnings += [f"{one.origin}: {advice(one.key, one.instead)}" for one in overrides if one.instead]
    of_file = document.origins().items()
    kept = {place: at for place, at in of_file if not any(place[:n] in origins for n in range(1, len(place)))}
    return config.with_old_names(warnings).with_origins({**kept, **origins})


def load_backends(path: Path) -> tuple[BackendConfig, ...]:
    """Reads a file that contains only backends. Raises ConfigError with all problems."""
    return validated(BackendsFile, Document(path), {}).backends


def validated(top: type[S], document: Document, origins: Mapping[Place, str]) -> S:
    """Validates the document as the section `top`. Raises ConfigError with all problems."""
    problems = document.problems
    found: S | None = None
    try:
        found = top.model_validate(document.values)
    except ValidationError as error:
        for place, reason in _reasons(error, top):
            origin = next((origins[place[:n]] for n in range(len(place), 0, -1) if place[:n] in origins), None)
            line = 0 if origin else document.line(place)
            written = dotted(place if origin else document.as_written(place))
            if origin and place[0] == "backends" and place[-1] == "url":
                # The user wrote no key, and the reason has the URL.
                written = ""
            problems.append((line, f"{origin or document.at(line)}: {written}{reason}"))
    if problems or found is None:
        raise ConfigError([text for _, text in sorted(problems, key=lambda problem: problem[0])])
    return found


def warnings_of(path: Path, config: Config) -> list[str]:
    """Returns a line for each setting in the file at `path` that has no effect or an old name."""
    document = Document(path)
    found = [(document.line(place), f"{dotted(place)}{reason}") for place, reason in find_idle(config)]
    return [f"{document.at(line)}: warning: {warning}" for line, warning in sorted(found + document.old_names())]


def unused_settings(config: Config) -> list[str]:
    """Returns a line for each setting without effect."""
    return [f"{dotted(place)}{reason}" for place, reason in find_idle(config)]


def _set_value(values: dict[Any, Any], place: Place, value: str | list[str] | None) -> bool:
    """Sets the value at `place`. Returns False if a parent of `place` is no section, which validation reports."""
    for part in place[:-1]:
        if values.get(part) is None:
            values[part] = {}
        if not isinstance(values[part], dict):
            return False
        values = values[part]
    values[place[-1]] = value
    return True


# --- messages ---------------------------------------------------------------------------------------------------------

MESSAGES = {
    "missing": "is missing",
    "model_type": "should be a section: lines of the form `key: value`, indented below it",
    "dict_type": "should be a section: lines of the form `key: value`, indented below it",
    "tuple_type": "should be a list",
    "string_pattern_mismatch": "should be printable ASCII characters without spaces",
}
"""Messages that replace unclear ones of pydantic, by error type."""


def _reasons(error: ValidationError, top: type[Section]) -> Iterator[tuple[Place, str]]:
    for detail in error.errors(include_url=False):
        if (removed := REMOVED_KEYS.get(dotted(detail["loc"])[:-2])) is not None:
            yield detail["loc"], f"was removed ({removed}): remove the key"
        elif detail["type"] == "extra_forbidden":
            meant = _nearest_key(detail["loc"], top)
            yield detail["loc"], "is not a known key" + (f' (nearest known key: "{meant}")' if meant else "")
        # This error only follows another problem, which is reported.
        elif detail["type"] != "default_factory_not_called":
            yield detail["loc"], _reason_of(detail)


def _reason_of(detail: ErrorDetails) -> str:
    if detail["input"] is None:
        return "has no value, and may not be null: give it one, or leave it out"
    if detail["type"] in MESSAGES:
        return MESSAGES[detail["type"]]
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    reason = re.sub(r"^\w+ should", "should", detail["msg"]).partition(", unable to")[0]
    # A rejected API key may still be a secret, and this text may be logged.
    secret = any(part in SECRET for part in detail["loc"])
    return reason if secret else f"{reason}, not {reprlib.repr(detail['input'])}"


def _nearest_key(place: Place, top: type[Section]) -> str | None:
    """Suggests a known key for the unknown key at `place`; None if no key is similar.

    Tries in this order: a very similar key of the section, the same key elsewhere, a similar key of the section, a key
    of the section with these initials (rpm: requests_per_min), a very similar key elsewhere.
    """
    word, here = str(place[-1]), [one.name for one in walk(_section_at(top, place[:-1])) if "." not in one.name]
    elsewhere = {key.rpartition(".")[2]: key for key in leaves(top)}

    def similar(known: Iterable[str], cutoff: float) -> list[str]:
        return get_close_matches(word.lower(), list(known), n=1, cutoff=cutoff)

    found = (
        similar(here, 0.8)
        or [key for name, key in elsewhere.items() if name == word]
        or similar(here, 0.6)
        or [key for key in here if len(word) > 1 and "".join(part[:1] for part in key.split("_")) == word]
        or [elsewhere[name] for name in similar(elsewhere, 0.8)]
    )
    return found[0] if found else None


def _section_at(top: type[Section], place: Place) -> type[Section]:
    section = top
    for part in place:
        if isinstance(part, str):
            section = next(sections_in(section.model_fields[part].annotation))
    return section
