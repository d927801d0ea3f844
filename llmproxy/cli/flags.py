"""Derives flags and variables of `serve` from the configuration keys, and explains unknown flags and variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from llmproxy.config import PLACEMENT_PRESETS, ConfigError, Override, keys, keys_of_files, nearest
from llmproxy.config.document import OLD_KEYS
from llmproxy.lifecycle.handover import DRAINED
from llmproxy.lifecycle.sockets import PREDECESSOR

PREFIX = "LLMPROXY_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"  # Path of the configuration file, like --config.
ADMIN_KEY_VARIABLE = f"{PREFIX}ADMIN_KEY_PLAIN"
"""The admin key in plain text, for commands that query a proxy. LLMPROXY_ADMIN_KEY is its hash, for `serve`."""
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, ADMIN_KEY_VARIABLE, DRAINED, PREDECESSOR})
"""Variables that set no key. A process passes the last two to its successor."""
OF_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in each pod for a Service whose name begins with llmproxy. They are ignored."""
ADDRESS = re.compile(r"(tcp|udp|sctp)://")

ALIASES: Mapping[str, tuple[str, ...]] = {
    "--backend": ("backends",),
    "--static-backends": ("backends",),
    "--worker-urls": ("backends",),
    "--api-key": ("api_keys",),
    "--placement": ("scheduling.placement",),
    "--policy": ("scheduling.placement",),
    "--routing-logic": ("scheduling.placement",),
    "--fairness": ("scheduling.fairness",),
    "--queue-size": ("queue.requests_max",),
    "--queue-timeout-secs": ("queue.max_wait_s",),
    "--request-timeout-secs": ("timeouts.total_s",),
    "--max-payload-size": ("body_bytes_max",),
    "--drain-timeout": ("drain_timeout_s",),
    "--engine-stats-interval": ("poll.interval_s", "poll.page_interval_s"),
    "--cb-failure-threshold": ("health.failures_before_ejection",),
    "--health-failure-threshold": ("health.misses_before_down",),
    "--retry-max-retries": ("retry.extra_attempts",),
    "--max-instance-failover-reroute-attempts": ("retry.extra_attempts",),
}
"""Maps short names of flags, and flags of other routers, to the keys that they set."""

SHORT = ("--backend", "--api-key", "--placement", "--fairness")
"""Short names that the help shows instead of a key's own flag."""
COMMON: Mapping[str, tuple[str, ...]] = {
    "Backends": ("--backend", "--backend-api-key", "--discovery-file"),
    "Clients": ("--host", "--port", "--api-key", "--tls-cert", "--tls-key"),
    "Scheduling": ("--placement", "--fairness", "--queue-max-wait-s", "--queue-requests-max"),
    "Process": ("--workers", "--admin-port", "--log-level", "--log-format", "--drain-timeout-s"),
}
"""Maps each panel of `serve --help` to the flags that it shows."""

PLACEMENTS_ELSEWHERE = {"roundrobin": "round_robin"} | {name.replace("_", "-"): name for name in PLACEMENT_PRESETS}
LIST_SEPARATORS = {
    "backends": re.compile(r"(?:\s|,(?![\w./-]+!?=[\w.-]*(?:,|$|:(?!//))))+"),
    "api_keys": re.compile(r"\s+"),
}
"""Separators of list items in one text. An API key may contain a comma, and so may a label selector (app=a,tier=b)."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `serve`, its environment variable, and the configuration keys that both override."""

    name: str
    keys: tuple[str, ...]

    @property
    def parameter(self) -> str:
        return self.name.strip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        return PREFIX + self.parameter.upper()


def flag_of(key: str) -> str:
    """Returns the flag name of a dotted key."""
    return "--" + re.sub(r"[._]", "-", key)


OLD_FLAGS = {Flag(flag_of(old), (new,)): Flag(flag_of(new), (new,)) for old, new in OLD_KEYS.items() if new in keys()}
"""Maps the flag of each renamed key to the flag of its new name."""
FLAGS = (*(Flag(flag_of(key), (key,)) for key in keys()), *(Flag(name, ALIASES[name]) for name in ALIASES), *OLD_FLAGS)

SHOWN = {key: flag_of(key) for key in keys()} | {ALIASES[name][0]: name for name in SHORT}
"""Maps each key to the only flag that the help shows for it."""
BACKENDS = next(flag for flag in FLAGS if flag.keys == ("backends",))


def _overrides(given: Iterable[tuple[Flag, str, Sequence[str]]]) -> list[Override]:
    """Returns one override for each key that (flag, origin, values) entries set. Values of lists are joined.

    Raises ConfigError if two entries set the same key, unless it is in LIST_SEPARATORS.
    """
    found: dict[str, Override] = {}
    for flag, origin, texts in given:
        for key in flag.keys:
            earlier = found.get(key)
            if key in LIST_SEPARATORS:
                # An empty text stays an item and is refused: `--api-key ""` must not accept every client.
                split = LIST_SEPARATORS[key].split
                items = [item for text in texts for item in [*filter(None, split(text))] or [text]]
                if earlier:
                    items, origin = [*earlier.value, *items], f"{earlier.origin}, {origin}"
                found[key] = Override(key, items, origin)
                continue
            if earlier:
                raise ConfigError([f"{origin}: {key}: is set by {earlier.origin} too; give only one of them"])
            text = texts[-1]
            if key == "scheduling.placement":
                text = PLACEMENTS_ELSEWHERE.get(text.lower(), text)
            today = OLD_FLAGS.get(flag)
            instead = "" if today is None else today.name if origin == flag.name else today.variable
            found[key] = Override(key, text, origin, instead)
    return list(found.values())


def from_environment(environment: Mapping[str, str]) -> list[Override]:
    """Returns the configuration overrides from environment variables. Raises ConfigError with all unknown variables.

    Empty variables are ignored, except the variables of API keys: an empty secret must not accept every client.
    """
    ours = {name: text for name, text in environment.items() if name.startswith(PREFIX) and not _injected(name, text)}
    known = {flag.variable: flag for flag in FLAGS}
    if unknown := sorted(ours.keys() - known.keys() - OTHER_VARIABLES):
        raise ConfigError([f"{name}: {_of_variable(name, [*known, CONFIG_VARIABLE])}" for name in unknown])
    said = {name: text for name, text in ours.items() if text or (name in known and known[name].keys == ("api_keys",))}
    return _overrides((flag, name, [said[name]]) for name, flag in known.items() if name in said)


def _injected(name: str, text: str) -> bool:
    return OF_KUBERNETES.fullmatch(name) is not None or (name.endswith("_PORT") and ADDRESS.match(text) is not None)


def _of_variable(name: str, known: Sequence[str]) -> str:
    words = name.removeprefix(PREFIX)
    likest = nearest(words, [one.removeprefix(PREFIX).lower() for one in known])
    advice = _ONLY_IN_FILES.get("--" + words.lower().replace("_", "-"))
    return advice or f'is not a known variable (nearest known variable: "{PREFIX}{likest.upper()}")'


def from_flags(flags: Mapping[str, Sequence[str] | str | None], urls: Sequence[str]) -> list[Override]:
    """Returns the overrides from `flags` (parameter name -> values) and positional `urls`. Raises ConfigError."""
    given = [(flag, flag.name, flags.get(flag.parameter)) for flag in FLAGS]
    texts = [(flag, name, [value] if isinstance(value, str) else value or []) for flag, name, value in given]
    return _overrides(one for one in [*texts, (BACKENDS, "URL", urls)] if one[2])


def unknown_flags(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns a line of advice for each unknown flag whose key only a file can set, or whose section is missing."""
    names = dict.fromkeys(word.partition("=")[0] for word in takewhile(lambda word: word != "--", arguments))
    advice = {name: _ONLY_IN_FILES.get(name) or _with_section(name) for name in names if name not in known}
    return [f"{name}: {text}" for name, text in advice.items() if text]


def _with_section(flag: str) -> str | None:
    """Returns advice for a flag without its section, such as `--max-wait-s`; None if no section has such a key."""
    if found := [shown for key, shown in SHOWN.items() if flag_of(key.rpartition(".")[2]) == flag]:
        return f"is not a known flag; write {' or '.join(found)} (--help-all shows all flags)"
    return None


def _only_in_files() -> dict[str, str]:
    """Maps names of flags that do not exist, because only a file can set the key, to an error message.

    Each such key has two names, with and without the name of the section.
    """
    found: dict[str, list[str]] = {}
    for key in keys_of_files():
        for name in dict.fromkeys((flag_of(key.replace("[]", "")), flag_of(key.rpartition(".")[2]))):
            found.setdefault(name, []).append(key)
    return {
        name: f"only a file can hold {' or '.join(places)}: write it into the file that --config names"
        for name, places in found.items()
        if name not in {flag.name for flag in FLAGS}
    }


_ONLY_IN_FILES = _only_in_files()
