"""The differences between two configurations, and the keys whose change needs a restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmproxy.config.config import Config
from llmproxy.config.schema import ClientsConfig, Section

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
        "shared_limits",
        "decision_log",
        "decision_log_sample",
        "genai_metrics",
        "key_metrics",
        "tracing",
        "state_file",
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
SECRET = frozenset(
    {"api_keys", "backend_api_key", "admin_key", "api_key", "keys", "hash", "lock", "store", "cache_salt"}
)
"""Keys whose values are never logged, not even as hashes."""
TEXT_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Change:
    """A changed key with both values as text. A missing value is None, and so are both values of a secret."""

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
    """Every key whose value differs. List entries are compared by their `name`; a new entry is one change."""
    return list(_differences(_plain(old), _plain(new), ""))


def with_reloadable(old: Config, new: Config) -> Config:
    """`new`, but with the old value of each key that needs a restart."""
    top = {key: getattr(old, key) for key in NEEDS_RESTART if "." not in key}
    for section in {key.partition(".")[0] for key in NEEDS_RESTART if "." in key}:
        was, now = getattr(old, section), getattr(new, section)
        kept = {key.partition(".")[2] for key in NEEDS_RESTART if key.startswith(f"{section}.")}
        # A copied value counts as given, so only different values are copied.
        changed = {key: getattr(was, key) for key in kept if getattr(was, key) != getattr(now, key)}
        top[section] = now.model_copy(update=changed)
    return new.model_copy(update=top)


def read_at_start(key: str) -> bool:
    """Whether the key of a change is read only when the proxy starts."""
    return key in NEEDS_RESTART or key.partition(".")[0] in NEEDS_RESTART


def _plain(value: Any) -> Any:
    """Sections, and lists of named sections, as mappings; any other value unchanged."""
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple) and value and all(isinstance(one, Section) and hasattr(one, "name") for one in value):
        return _Named((one.name, _plain(one)) for one in value)
    return value


class _Named(dict[str, Any]):
    """The entries of a list by name."""


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
    """A value in one line of bounded length, without the secrets in it."""
    if isinstance(value, Mapping):
        shown = {k: v for k, v in value.items() if k not in SECRET and v not in (None, (), {})}
        text = ", ".join(f"{k}: {value_text(v)}" for k, v in shown.items())
        text = f"{{{text}}}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        text = f"[{', '.join(map(str, value))}]"
    else:
        text = "null" if value is None else str(value)
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}..."
