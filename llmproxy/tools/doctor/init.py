"""Writes a configuration with only the keys that differ from the defaults (`llmproxy init`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

from llmproxy.config import BackendConfig, ConfigError, load, reference, warnings_of
from llmproxy.tools.doctor.carried import Carried
from llmproxy.tools.doctor.look import LLAMA_CPP, Replica
from llmproxy.tools.doctor.presets import PRESETS, Preset, Setting
from llmproxy.tools.doctor.report import base_models, engine_of, fleet_problems
from llmproxy.tools.terminal import printable

COLUMNS = 100
HEAD = "Every key that is not here has its default: `llmproxy config` prints them all."
KEY = "The servers want an API key: set LLMPROXY_BACKEND_API_KEY for `llmproxy serve`. Every server above gets it."
OPEN = "llmproxy asks clients for no key until you set api_keys or tenants, even if your servers or your router did."


def configuration(
    replicas: Sequence[Replica],
    looked_up: Sequence[BackendConfig],
    preset: str | None,
    carried: Carried | None,
    *,
    has_key: bool,
) -> str:
    """Returns the text of a configuration file.

    Args:
        replicas: The servers that answered or should have answered. An unusable server is written with the reason.
        looked_up: The backends whose servers DNS or Kubernetes lists.
        preset: A name in `PRESETS`, or None.
        carried: Settings of another router, or None.
        has_key: Whether the servers want an API key.
    """
    chosen = PRESETS[preset] if preset else Preset()
    settings = {setting.key: setting for setting in chosen.settings}
    if carried is not None:
        for key, value in carried.keys.items():
            settings.setdefault(key, Setting(key, value, f"As in {carried.router}."))
    lines = [*_comment(HEAD), *_settings([one for one in settings.values() if "." not in one.key]), "backends:"]
    for replica in replicas:
        lines += _backend(replica)
    lines += [f"  - {_text(_url(backend))}" for backend in looked_up]
    for problem in fleet_problems(replicas):
        lines += _comment(f"{problem.text}. {problem.remedy}")
    if has_key:
        lines += _comment(f"{KEY} {OPEN}")
    lines += _models(replicas, chosen, carried)
    lines += _settings([one for one in settings.values() if "." in one.key])
    if carried is not None and carried.left:
        lines += _comment(f"Not carried over from {carried.router}:")
        for left in carried.left:
            lines += wrap(printable(left, 1_000), COLUMNS, initial_indent="# - ", subsequent_indent="#   ")
    return "\n".join(lines) + "\n"


def write(text: str, path: Path) -> list[str]:
    """Writes a configuration to `path` if `load` accepts it. Returns the warnings about it.

    Raises ConfigError if it is wrong, and OSError if the file cannot be written.
    """
    with TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text)
        try:
            config = load(draft)
        except ConfigError as error:
            raise ConfigError([problem.replace(str(draft), str(path)) for problem in error.problems]) from None
        warnings = [warning.replace(str(draft), str(path)) for warning in warnings_of(draft, config)]
    path.write_text(text)
    return warnings


def _backend(replica: Replica) -> Iterator[str]:
    models = ", ".join(printable(card.name) for card in base_models(replica))
    about = f"  # {engine_of(replica)}: {models}" if replica.usable else ""
    entry: Any = _url(replica.backend)
    if replica.engine == LLAMA_CPP and replica.batch_limit is not None:
        role = {} if replica.backend.role == "both" else {"role": replica.backend.role}
        entry = {"url": replica.backend.url, **role, "max_in_flight": replica.batch_limit}
    yield f"  - {_text(entry)}{about}"
    for problem in replica.problems:
        yield from _comment(f"{problem.text}. {problem.remedy}", "    ")


def _url(backend: BackendConfig) -> str:
    return backend.url if backend.role == "both" else f"{backend.role}={backend.url}"


def _models(replicas: Sequence[Replica], preset: Preset, carried: Carried | None) -> Iterator[str]:
    entries: list[dict[str, Any]] = []
    for name, targets in carried.aliases.items() if carried is not None else ():
        weights = {"target": targets[0]} if len(targets) == 1 else {"targets": dict.fromkeys(targets, 1)}
        entries.append({"name": name} | weights)
    aliases = {entry["name"] for entry in entries}
    listed = dict.fromkeys(card.name for replica in replicas if replica.usable for card in replica.models)
    judged = [{"name": name} | dict(preset.model) for name in listed if preset.model and name not in aliases]
    if preset.model and not judged:
        entry = _text({"name": "MODEL"} | dict(preset.model))
        yield from _comment(f"No server told its models. The preset sets for each under `models:`: {entry}")
    if not entries and not judged:
        return
    yield "models:"
    yield from (f"  - {_text(entry)}" for entry in entries)
    if judged:
        yield from _comment(preset.model_why, "  ")
    yield from (f"  - {_text(entry)}" for entry in judged)


def _settings(settings: Sequence[Setting]) -> Iterator[str]:
    """Yields the lines of the settings, section by section."""
    sections: dict[str, list[Setting]] = {}
    for setting in settings:
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    for section, inside in sections.items():
        indent = "  " if section else ""
        if section:
            yield f"{section}:"
        for setting in inside:
            yield from _comment(setting.why, indent)
            yield f"{indent}{setting.key.rpartition('.')[2]}: {_text(setting.value)}"


def _text(value: Any) -> str:
    """Returns a value as YAML in one line, with whole numbers as integers."""
    if isinstance(value, dict):
        value = {key: int(one) if isinstance(one, float) and one.is_integer() else one for key, one in value.items()}
    return reference.as_text(value)


def _comment(text: str, indent: str = "") -> list[str]:
    return wrap(printable(text, 10_000), COLUMNS, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
