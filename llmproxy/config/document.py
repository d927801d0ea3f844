"""Reads a YAML file, remembers the line of each value, and translates old names of keys."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

OLD_KEYS: Mapping[str, str] = {
    "admin.open_metrics": "admin.public_metrics",
    "clients.body_silence_s": "clients.body_idle_timeout_s",
    "discovery.gone_after": "discovery.misses_before_removal",
    "health.backoff_max_s": "health.ejection_max_s",
    "health.backoff_s": "health.ejection_s",
    "health.ejected_max": "health.ejected_ratio_max",
    "health.failures": "health.failures_before_ejection",
    "health.unreachable_after": "health.misses_before_down",
    "queue.band_ttl_s": "queue.band_max_wait_s",
    "queue.first_hold_s": "queue.startup_wait_s",
    "queue.hold_s": "queue.no_backend_wait_s",
    "queue.ttl_s": "queue.max_wait_s",
    "scaling.drain_s": "scaling.target_wait_s",
    "scheduling.charged": "scheduling.fairness_cost",
    "scheduling.kv_full": "scheduling.kv_full_ratio",
    "scheduling.reserve_s": "scheduling.headroom_s",
    "scheduling.start_limit": "scheduling.initial_batch_limit",
    "scheduling.withdrawal": "scheduling.preemption",
}
"""Old and new names of keys outside lists. Old names work until 0.1.0 is released. Both at once are an error."""

REMOVED_KEYS: Mapping[str, str] = {"cluster.pools": "one leader schedules all pools; a larger fleet runs two clusters"}
"""Removed keys, each with the reason. A file with such a key is refused, as with any unknown key."""


def advice(key: str, instead: str) -> str:
    """Returns the warning for an old name of `key`. `instead` is the new key, flag or variable."""
    return f"is the old name of {key} and works until 0.1.0; write {instead}"


FILE_BYTES_MAX = 4 << 20

Place = tuple[str | int, ...]  # The path from the top of a file to a value: keys, and indexes of list items.
OLD_PLACES: dict[Place, tuple[str, ...]] = {
    tuple(old.split(".")): tuple(new.split(".")) for old, new in OLD_KEYS.items()
}


class ConfigError(Exception):
    """A configuration that cannot be used. `problems` has a line to print for each error."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def dotted(place: Place) -> str:
    """Formats a place in the configuration as the start of a message: `models[0].name: `."""
    # A key may contain control characters of terminals.
    shown = (part if isinstance(part, int) or part.isprintable() else ascii(part)[1:-1] for part in place)
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in shown if part != "[key]")
    return f"{text.lstrip('.')}: " if text else ""


class _Loader(yaml.SafeLoader):
    """Reads plain scalars as YAML 1.2 does, so that `no`, `12:30` and `2024-01-01` stay texts."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):
            reason = f"{reprlib.repr(node.value)} does not match its tag {node.tag}"
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
    """A parsed YAML file: its `values`, and its `problems`: (line, text) for each key that is given twice.

    Without a path, the document is empty. Raises ConfigError if the file is unreadable or no YAML.
    """

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
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            raise ConfigError([f"{self.at(mark.line + 1 if mark else 0)}: is no valid YAML: {reason}"]) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError([f"{self.at(line)}: holds a character that YAML does not allow"]) from None
        except RecursionError:
            raise ConfigError([f"{path}: is nested too deeply"]) from None

    def at(self, line: int) -> str:
        """Returns the prefix of messages about a line. Line 0 is the whole file."""
        name = str(self._path or "configuration")
        return f"{name}:{line}" if line else name

    def line(self, place: Place) -> int:
        """Returns the line, from 1, of `place` or of its nearest parent in the file; 0 without a file."""
        if self._root is None:
            return 0
        node, line = self._root, self._root.start_mark.line
        for part in place:
            found = next((pair for pair in _children(node) if pair[0] == part), None)
            if found is None:
                break
            _, line, node = found
        return line + 1

    def origins(self) -> dict[Place, str]:
        """Maps the place of each value to its line."""
        found: dict[Place, str] = {}
        pending: list[tuple[Place, yaml.Node | None]] = [((), self._root)]
        seen: set[int] = set()
        while pending:
            place, node = pending.pop()
            if node is None or id(node) in seen:
                continue
            # Anchors may make a document endless.
            seen.add(id(node))
            for part, line, child in _children(node):
                found.setdefault((*place, part), self.at(line + 1))
                pending.append(((*place, part), child))
        return found | {tuple(key.split(".")): self.at(line) for key, (line, _) in self._old.items()}

    def as_written(self, place: Place) -> Place:
        """Returns `place` with the old name of its key, if the file uses the old name."""
        return next((old for key, (_, old) in self._old.items() if place == tuple(key.split("."))), place)

    def old_names(self) -> list[tuple[int, str]]:
        """Returns (line, warning) for each key under an old name."""
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
                key.tag = _TEXT  # Keys are texts, even if they look like numbers, as names of bands may.
                line = key.start_mark.line + 1
                written: Place = (*place, key.value)
                # A key of a merged mapping (`<<`) belongs to the mapping around it.
                merged = tuple(part for part in written if part != "<<" and isinstance(part, str))
                # The node gets the new name, so that problems of the value name this line.
                if merged in OLD_PLACES:
                    self._old.setdefault(".".join(OLD_PLACES[merged]), (line, merged))
                    key.value = OLD_PLACES[merged][-1]
                if key.value in first:
                    reason = f"is given twice, first in line {first[key.value]}"
                    if (old := self.as_written((*place, key.value)))[-1] != key.value:
                        reason += f"; {old[-1]} is the old name of {key.value}"
                    self.problems.append((line, f"{self.at(line)}: {dotted(written)}{reason}"))
                first.setdefault(key.value, line)
        for name, _, child in _children(node):
            self._find_duplicates(child, (*place, name), seen)


def _children(node: yaml.Node) -> Iterator[tuple[str | int, int, yaml.Node]]:
    """Yields (key or index, line from 0, node) of each value inside `node`."""
    if isinstance(node, yaml.MappingNode):
        yield from ((key.value, key.start_mark.line, value) for key, value in reversed(node.value))
    elif isinstance(node, yaml.SequenceNode):
        yield from ((i, item.start_mark.line, item) for i, item in enumerate(node.value))
