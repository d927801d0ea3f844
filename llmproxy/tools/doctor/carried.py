"""The part of another router's configuration that has a meaning here."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

from msgspec import Struct, field

from llmproxy.config import ConfigError, Override, load
from llmproxy.config.value_types import backend_from_text, backend_url
from llmproxy.tools.terminal import printable

SESSION_PLACEMENTS = frozenset({
    "session", "consistent_hash", "consistent_hashing", "rendezvous_hash", "sticky_least_loaded",
    "manual", "ip_hash", "hash",
})  # fmt: skip
"""Placements elsewhere that keep a session on one replica."""


class NotReadError(Exception):
    """The text is of no router that is known here. The message names the known ones."""


class Carried(Struct):
    """Settings of another router, in the words of llmproxy."""

    # The name of the other router.
    router: str
    # URLs, with a role where it is not both.
    backends: list[str] = field(default_factory=list)
    # Dotted key -> value.
    keys: dict[str, Any] = field(default_factory=dict)
    # Alias -> names of models.
    aliases: dict[str, list[str]] = field(default_factory=dict)
    # Settings that are not carried over, with reasons.
    left: list[str] = field(default_factory=list)

    def leave(self, what: str, why: str = "") -> None:
        self.left.append(printable(what) + (f": {printable(why)}" if why else ""))

    def add_backend(self, text: str) -> None:
        """Adds a server once, or leaves an unusable URL out with the reason."""
        written = backend_from_text(text)
        url = written["url"] if isinstance(written, dict) else text
        try:
            backend_url(url)
        except ValueError as error:
            # A query may have a secret.
            self.leave("a server", str(error).replace(url, url.partition("?")[0]))
            return
        if text not in self.backends:
            self.backends.append(text)

    def set(self, key: str, value: Any, written: str) -> None:
        """Sets a key, if its value is valid. `written` is the setting in the words of the other router."""
        try:
            config = load(None, [Override(key, value if isinstance(value, list) else str(value), written)])
        except ConfigError as error:
            self.leave(written, error.problems[0].removeprefix(f"{written}: "))
            return
        found = attrgetter(key)(config)
        self.keys[key] = list(found) if isinstance(found, tuple) else found

    def place(self, placement: str, name: str) -> None:
        """Carries a placement by session over. The default suits all others. `name` is the other router's setting."""
        if placement.lower().replace("-", "_") in SESSION_PLACEMENTS:
            self.set("scheduling.placement", "session", name)
        else:
            self.leave(name, "the default placement `cost` weighs queues, cached prefixes and adapters")


def pods_url(selector: str, port: str, namespace: str = "", role: str = "") -> str:
    """Returns the URL of pods by their labels, which commas or spaces separate."""
    labels = ",".join(re.split(r"[\s,]+", selector.strip()))
    return f"{role and role + '='}kubernetes+http://{namespace and namespace + '/'}pods/{labels}:{port}"
