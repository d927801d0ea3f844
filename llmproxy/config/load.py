"""Reads a configuration so that everything wrong with it is told at once, each thing with the line it stands on."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmproxy.config.config import BackendsFile, Config
from llmproxy.config.keys import keys, leaves, sections_in
from llmproxy.config.renamed import OLD_KEYS, advice
from llmproxy.config.schema import BackendConfig, Section, may_be_null
from llmproxy.config.unused import find_unused
from llmproxy.config.value_types import nearest

FILE_BYTES_MAX = 4 << 20
NULLS = frozenset({"null", "none"})
"""Texts that a flag or a variable has for null, in any case, where its key may be null."""

S = TypeVar("S", bound=Section)
Place = tuple[str | int, ...]
"""The way from the top of a configuration to one value: keys, and indexes of list items."""
OLD_PLACES: dict[Place, tuple[str, ...]] = {
    tuple(old.split(".")): tuple(renamed.key.split(".")) for old, renamed in OLD_KEYS.items()
}


class ConfigError(Exception):
    """A configuration that cannot be used. `problems` has one line for each thing wrong, ready to be printed."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Override:
    """A value put over the file: `key` is dotted, `value` text or a list of texts, `origin` the flag or variable.

    `instead` is the flag or variable of today, where `origin` is an old name of it.
    """

    key: str
    value: str | list[str]
    origin: str
    instead: str = ""


def load(path: Path | None = None, overrides: Sequence[Override] = ()) -> Config:
    """The defaults, under the file at `path` if there is one, under `overrides`, of which later ones win.

    Raises ConfigError with every problem found; a value that is overridden is not looked at.
    """
    document = Document(path)
    origins: dict[Place, str] = {}
    nullable = {key for key, field in keys().items() if may_be_null(field)}
    for override in overrides:
        place: Place = tuple(override.key.split("."))
        null = override.key in nullable and isinstance(override.value, str) and override.value.lower() in NULLS
        if _put(document.values, place, None if null else override.value):
            origins[place] = override.origin
    config = _validated(Config, document, origins)
    warnings = [f"{document.at(line)}: {told}" for line, told in document.old_names()]
    warnings += [f"{one.origin}: {advice(one.key, one.instead)}" for one in overrides if one.instead]
    return config.with_old_names(warnings)


def load_backends(path: Path) -> tuple[BackendConfig, ...]:
    """The backends in a file of their own. Raises ConfigError with every problem found."""
    return _validated(BackendsFile, Document(path), {}).backends


def _validated(top: type[S], document: Document, origins: Mapping[Place, str]) -> S:
    problems = document.problems
    found: S | None = None
    try:
        found = top.model_validate(document.values)
    except ValidationError as error:
        for place, reason in _reasons(error, top):
            origin = next((origins[place[:n]] for n in range(len(place), 0, -1) if place[:n] in origins), None)
            line = 0 if origin else document.line(place)
            written = dotted(place if origin else document.as_written(place))
            problems.append((line, f"{origin or document.at(line)}: {written}{reason}"))
    if problems or found is None:
        raise ConfigError([text for _, text in sorted(problems, key=lambda problem: problem[0])])
    return found


def warnings_of(path: Path, config: Config) -> list[str]:
    """One line for each setting of the file at `path` that does nothing in `config`, which was loaded from it."""
    document = Document(path)
    found = [(document.line(place), f"{dotted(place)}{reason}") for place, reason in find_unused(config)]
    return [f"{document.at(line)}: warning: {told}" for line, told in sorted(found + document.old_names())]


def unused_settings(config: Config) -> list[str]:
    """As `warnings_of`, of a configuration that need not be from a file."""
    return [f"{dotted(place)}{reason}" for place, reason in find_unused(config)]


def _put(values: dict[Any, Any], place: Place, value: str | list[str] | None) -> bool:
    """Put `value` at `place`; False where the file has no section there, which is a problem told anyway."""
    for part in place[:-1]:
        if values.get(part) is None:
            values[part] = {}
        if not isinstance(values[part], dict):
            return False
        values = values[part]
    values[place[-1]] = value
    return True


# --- what is wrong, in words ------------------------------------------------------------------------------------------

SAID_BETTER = {
    "missing": "is missing",
    "model_type": "should be a section: lines of the form `key: value`, indented below it",
    "dict_type": "should be a section: lines of the form `key: value`, indented below it",
    "tuple_type": "should be a list",
    "string_pattern_mismatch": "should be printable ASCII characters without spaces",
}


def _reasons(error: ValidationError, top: type[Section]) -> Iterator[tuple[Place, str]]:
    for detail in error.errors(include_url=False):
        if detail["type"] == "findings":
            yield from ((detail["loc"] + place, reason) for place, reason in detail["ctx"]["findings"])
        elif detail["type"] == "extra_forbidden":
            yield detail["loc"], f'is not a known key (nearest known key: "{_nearest_key(detail["loc"], top)}")'
        # A default that could not be derived is the shadow of another problem, which is told.
        elif detail["type"] != "default_factory_not_called":
            yield detail["loc"], reason_of(detail)


def reason_of(detail: ErrorDetails) -> str:
    if detail["type"] in SAID_BETTER:
        return SAID_BETTER[detail["type"]]
    if detail["input"] is None:
        return "has no value, and may not be null: give it one, or leave it out"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    reason = re.sub(r"^\w+ should", "should", detail["msg"]).partition(", unable to")[0]
    # A key that is wrong is still somebody's secret, and this text may end up in a log.
    secret = any("api_key" in str(part) or part == "cache_salt" for part in detail["loc"])
    return reason if secret else f"{reason}, not {reprlib.repr(detail['input'])}"


def _nearest_key(place: Place, top: type[Section]) -> str:
    """One beside the unknown one if it looks very much like it; else the very key where it stands elsewhere; else any
    that looks like it, those beside it first; else the likest of those beside it.
    """
    word, beside = str(place[-1]), tuple(section_at(top, place[:-1]).model_fields)
    elsewhere = {key.rpartition(".")[2]: key for key in leaves(top)}
    if twin := get_close_matches(word.lower(), beside, n=1, cutoff=0.8):
        return twin[0]
    if word in elsewhere:
        return elsewhere[word]
    for known in (beside, tuple(elsewhere)):
        if found := get_close_matches(word.lower(), known, n=1):
            return found[0] if known is beside else elsewhere[found[0]]
    return nearest(word, beside)


def section_at(top: type[Section], place: Place) -> type[Section]:
    """The section that stands at `place` of one of kind `top`."""
    section = top
    for part in place:
        if isinstance(part, str):
            section = next(sections_in(section.model_fields[part].annotation))
    return section


def dotted(place: Place) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part != "[key]")
    return f"{text.lstrip('.')}: " if text else ""


# --- YAML that knows its lines ----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads plain scalars as YAML 1.2 does, so that `no`, `12:30` and `2024-01-01` are the texts they look like."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):
            reason = f"{reprlib.repr(node.value)} is not what its tag {node.tag} says"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from None


_Loader.yaml_implicit_resolvers = {}
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
for _tag, _pattern, _first in (
    (_MERGE, r"<<", "<"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


class Document:
    """The file as `values`, as nodes that know their lines, and the `problems` of its syntax (line, text)."""

    def __init__(self, path: Path | None) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[tuple[int, str]] = []
        self._path = path
        self._root: yaml.Node | None = None
        self._old: dict[str, tuple[int, Place]] = {}
        if path is None:
            return
        text = ""
        try:
            text = self._text(path)
            self._parse(_Loader(text))
        except OSError as error:
            raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            told = ", ".join(part for part in (error.context, error.problem) if part)
            raise ConfigError([f"{self.at(mark.line + 1 if mark else 0)}: is no valid YAML: {told}"]) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError([f"{self.at(line)}: holds a character that YAML does not allow"]) from None
        except RecursionError:
            raise ConfigError([f"{path}: is nested too deeply"]) from None

    def at(self, line: int) -> str:
        return f"{self._path or 'configuration'}:{line}" if line else f"{self._path or 'configuration'}"

    def line(self, place: Place) -> int:
        """The line of the last part of `place` that is in the file, from 1; 0 without a file."""
        if self._root is None:
            return 0
        node, line = self._root, self._root.start_mark.line
        for part in place:
            found = next((pair for pair in _children(node) if pair[0] == part), None)
            if found is None:
                break
            _, line, node = found
        return line + 1

    def as_written(self, place: Place) -> Place:
        """`place` under the old name of its key, where the file has that."""
        return next((old for key, (_, old) in self._old.items() if place == tuple(key.split("."))), place)

    def old_names(self) -> list[tuple[int, str]]:
        """The line of each key that the file has under an old name, and what to write there instead."""
        return [(line, f"{dotted(old)}{advice(key, key)}") for key, (line, old) in self._old.items()]

    def _text(self, path: Path) -> str:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError([f"{path}: is larger than {FILE_BYTES_MAX} bytes, too large for a configuration"])
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ConfigError([f"{path}:{line}: is not UTF-8 text"]) from None

    def _parse(self, loader: _Loader) -> None:
        try:
            self._root = loader.get_single_node()
            if self._root is None:
                return
            self._find_duplicates(self._root, (), set())
            values = loader.construct_document(self._root)
        finally:
            loader.dispose()
        if isinstance(values, dict):
            self.values = values
        elif values is not None:
            raise ConfigError([f"{self.at(self.line(()))}: should be lines of the form `key: value`"])

    def _find_duplicates(self, node: yaml.Node, place: Place, seen: set[int]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        first: dict[str, int] = {}
        if isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                    continue
                key.tag = _TEXT  # Names of keys are texts, also where they look like numbers, as bands may.
                line = key.start_mark.line + 1
                written: Place = (*place, key.value)
                # The node gets the new name, so that what is wrong with the value is found in this line.
                if written in OLD_PLACES:
                    self._old.setdefault(".".join(OLD_PLACES[written]), (line, written))
                    key.value = OLD_PLACES[written][-1]
                if key.value in first:
                    reason = f"is given twice, first in line {first[key.value]}"
                    if (old := self.as_written((*place, key.value)))[-1] != key.value:
                        reason += f"; {old[-1]} is the old name of {key.value}"
                    self.problems.append((line, f"{self.at(line)}: {dotted(written)}{reason}"))
                first.setdefault(key.value, line)
        for name, _, child in _children(node):
            self._find_duplicates(child, (*place, name), seen)


def _children(node: yaml.Node) -> Iterator[tuple[str | int, int, yaml.Node]]:
    """The values inside `node`: key or index, line from 0, and node."""
    if isinstance(node, yaml.MappingNode):
        yield from ((key.value, key.start_mark.line, value) for key, value in reversed(node.value))
    elif isinstance(node, yaml.SequenceNode):
        yield from ((i, item.start_mark.line, item) for i, item in enumerate(node.value))
