"""The configuration in force, the differences between two configurations, and the keys whose change needs a restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmproxy.config.config import Config
from llmproxy.config.document import Place
from llmproxy.config.schema.process import ClientsConfig
from llmproxy.config.schema.section import Section

NEEDS_RESTART = frozenset(
    {
        "host",
        "port",
        "workers",
        "log_format",
        "admin",
        *(f"clients.{key}" for key in ClientsConfig.model_fields if key != "allowed_origins"),
        "tls",
        "cluster",
        "decision_log",
        "decision_log_sample",
        "tracing",
        "state_file",
        "usage",
        "plugins",
        "reload",
        # Policies keep state that depends on these, for every request that waits or runs.
        "scheduling.fairness",
        "scheduling.ordering",
        "scheduling.placement",
        "scheduling.fairness_cost",
        "scheduling.input_weight",
        "scheduling.output_weight",
        "scheduling.slo_window_s",
        "scheduling.seed",
    }
)
"""Keys and sections that are read only when the proxy starts."""
SECRET = frozenset({"api_keys", "backend_api_key", "admin_key", "api_key", "keys", "hash", "lock", "cache_salt"})
"""Keys whose values are never logged, not even as hashes."""
TEXT_CHARS_MAX = 200
DEFAULT = "default"
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Change:
    """A changed key with its old and new value as text. A missing value is None, and so are both values of a secret."""

    key: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.key}: changed, not shown"
        if self.old is None:
            return f"{self.key}: added {self.new}"
        return f"{self.key}: {self.old} -> {self.new}" if self.new is not None else f"{self.key}: removed"


def changes_between(old: Config, new: Config) -> list[Change]:
    """Returns every key whose value differs. List entries are compared by their `name`; a new entry is one change."""
    return list(_differences(_plain(old), _plain(new), ""))


def with_reloadable(old: Config, new: Config) -> Config:
    """Returns `new` with the old value of each key that needs a restart."""
    top = {key: getattr(old, key) for key in NEEDS_RESTART if "." not in key}
    for section in {key.partition(".")[0] for key in NEEDS_RESTART if "." in key}:
        was, now = getattr(old, section), getattr(new, section)
        kept = {key.partition(".")[2] for key in NEEDS_RESTART if key.startswith(f"{section}.")}
        # A copied value counts as given, so only different values are copied.
        changed = {key: getattr(was, key) for key in kept if getattr(was, key) != getattr(now, key)}
        top[section] = now.model_copy(update=changed)
    return new.model_copy(update=top)


def read_at_start(key: str) -> bool:
    """Returns whether a key is read only when the proxy starts."""
    return key in NEEDS_RESTART or key.partition(".")[0] in NEEDS_RESTART


def _plain(value: Any) -> Any:
    """Converts a section, or a list of named sections, to a mapping. Returns any other value unchanged."""
    if isinstance(value, Section):
        return {field.alias or name: _plain(getattr(value, name)) for name, field in type(value).model_fields.items()}
    # A key of a tenant may have no name.
    if isinstance(value, tuple) and value and all(isinstance(one, Section) and _name(one) for one in value):
        return _Named((one.name, _plain(one)) for one in value)
    return value


def _name(entry: Section) -> str | None:
    return getattr(entry, "name", None)


class _Named(dict[str, Any]):
    """The entries of a list, keyed by name."""


def _differences(old: Any, new: Any, key: str) -> Iterator[Change]:
    if old == new:
        return
    last = key.rpartition(".")[2]
    if last in SECRET:
        yield Change(key, None, None)
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _by_name(old, new, key)
    elif isinstance(old, _Named) or isinstance(new, _Named):
        # An empty list is a tuple, whatever its entries would be.
        yield from _by_name(old or _Named(), new or _Named(), key)
    else:
        yield Change(key, value_text(old), value_text(new))


def _by_name(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> Iterator[Change]:
    entries = isinstance(old, _Named) or isinstance(new, _Named)
    for name in dict.fromkeys((*old, *new)):
        place = f"{key}[{name}]" if entries else f"{key}.{name}".lstrip(".")
        if name not in old:
            yield Change(place, None, value_text(new[name]))
        elif name not in new:
            yield Change(place, value_text(old[name]), None)
        else:
            yield from _differences(old[name], new[name], place)


def value_text(value: Any) -> str:
    """Formats a value in one line of bounded length, with its secrets hidden."""
    if isinstance(value, Mapping):
        shown = {k: v for k, v in value.items() if k not in SECRET and v not in (None, (), {})}
        text = ", ".join(f"{k}: {value_text(v)}" for k, v in shown.items())
        text = f"{{{text}}}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        text = f"[{', '.join(map(str, value))}]"
    else:
        text = "null" if value is None else str(value)
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}..."


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """A key of the configuration with its value."""

    key: str
    # The value of the key as text; `***` for a secret.
    value: str
    # A file with its line, a flag, a variable, a Kubernetes object, or `default`.
    origin: str
    # Whether a change of the key needs a restart.
    restart: bool


def in_force(config: Config) -> list[SettingInForce]:
    """Returns every key with its value, in the order of the schema. Keys of list entries: `backends[gpu-0].url`."""
    return [setting for _, setting in _settings(config, "", (), config.origins)]


def origins_in_force(old: Config, new: Config) -> dict[Place, str]:
    """Returns the origins of `new`. A value of `old` that stays in force until a restart keeps its origin."""
    was, now = _of_the_start(old), _of_the_start(new)
    kept = {place: was[place].origin for place, one in now.items() if was.get(place, one).value != one.value}
    return {**new.origins, **kept}


def _of_the_start(config: Config) -> dict[Place, SettingInForce]:
    """Returns the settings that need a restart. Skips all other sections, because there may be thousands of tenants."""
    found: dict[Place, SettingInForce] = {}
    for name in {key.partition(".")[0] for key in NEEDS_RESTART}:
        below = _settings(getattr(config, name), name, (name,), config.origins, name in config.model_fields_set)
        found |= {place: one for place, one in below if one.restart}
    return found


def _settings(
    value: Any, key: str, place: Place, origins: Mapping[Place, str], given: bool = True
) -> Iterator[tuple[Place, SettingInForce]]:
    """Yields the settings below `value`. If not `given`, `value` is a default, and the origin of its section does not
    apply.
    """
    if isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            last, was_given = field.alias or name, name in value.model_fields_set
            yield from _settings(getattr(value, name), f"{key}.{last}".lstrip("."), (*place, last), origins, was_given)
    elif isinstance(value, tuple) and value and all(isinstance(one, Section) for one in value):
        for i, one in enumerate(value):
            yield from _settings(one, f"{key}[{_name(one) or i}]", (*place, i), origins)
    else:
        text = HIDDEN if value and place[-1] in SECRET else value_text(value)
        ends = range(len(place), 0 if given else len(place) - 1, -1)
        found = (origins[place[:end]] for end in ends if place[:end] in origins)
        yield place, SettingInForce(key, text, next(found, DEFAULT), read_at_start(key))
