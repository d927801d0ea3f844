"""Writes a configuration that has only what differs from the defaults (`llmproxy init`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from msgspec import Struct

from llmproxy.config import reference
from llmproxy.tools.doctor.look import Replica
from llmproxy.tools.doctor.other_routers import Carried
from llmproxy.tools.doctor.report import fleet_problems
from llmproxy.tools.terminal import printable

COLUMNS = 100


class Setting(Struct, frozen=True):
    """A key that a preset sets, and the reason."""

    key: str
    value: Any
    why: str


PRESETS: Mapping[str, tuple[Setting, ...]] = {}
"""Keys that matter for a kind of work. Every other default fits it."""


def configuration(replicas: Sequence[Replica], preset: str | None, carried: Carried | None, *, has_key: bool) -> str:
    """Returns the text of a configuration file for these replicas.

    Args:
        replicas: Servers that were looked at. Unusable ones are written too, with the reason.
        preset: A name in `PRESETS`, or None.
        carried: Settings of another router, or None.
        has_key: Whether the servers want an API key.
    """
    settings = list(PRESETS[preset] if preset else ())
    if carried is not None:
        preset_keys = {setting.key for setting in settings}
        origin = f"as in {printable(carried.router)}"
        settings += [Setting(key, value, origin) for key, value in carried.keys.items() if key not in preset_keys]
    lines = ["# Every key that is not here has its default. `llmproxy config` lists them all.", "backends:"]
    for replica in replicas:
        lines += _backend(replica)
    if looked_up := [url for url in carried.backends if "+" in url.partition("://")[0]] if carried else []:
        lines += [f"  - {reference.as_text(url)}" for url in looked_up]
    for problem in fleet_problems(replicas):
        lines += _comment(f"{problem.text}. {problem.remedy}", "")
    if has_key:
        lines += _comment("The servers want an API key: set LLMPROXY_BACKEND_API_KEY for `llmproxy serve`.", "")
    if carried is not None and carried.aliases:
        lines += ["models:"]
        for name, target in carried.aliases.items():
            lines.append(f"  - {reference.as_text({'name': name, 'target': target})}")
    lines += _settings(settings)
    if carried is not None and carried.left:
        lines += _comment(f"Not carried over from {printable(carried.router)}:", "")
        for left in carried.left:
            lines += _comment(f"  {left}", "")
    return "\n".join(lines) + "\n"


def _backend(replica: Replica) -> Iterator[str]:
    models = ", ".join(printable(card.name) for card in replica.models if card.parent is None)
    about = ": ".join(filter(None, (f"{replica.engine} {replica.version}".strip(), models)))
    yield f"  - {reference.as_text(replica.url)}" + (f"  # {about}" if about else "")
    for problem in replica.problems:
        yield from _comment(f"{problem.text}. {problem.remedy}", "    ")


def _settings(settings: Sequence[Setting]) -> Iterator[str]:
    """Yields the settings, section by section."""
    sections: dict[str, list[Setting]] = {}
    for setting in settings:
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    for section, inside in sections.items():
        indent = "  " if section else ""
        if section:
            yield f"{section}:"
        for setting in inside:
            yield from _comment(setting.why, indent)
            yield f"{indent}{setting.key.rpartition('.')[2]}: {reference.as_text(setting.value)}"


def _comment(text: str, indent: str) -> list[str]:
    return wrap(text, COLUMNS, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
