"""The settings of another router that have an equivalent in llmproxy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct, field

from llmproxy.config import ConfigError, Override, load
from llmproxy.config.value_types import backend_from_text, backend_url
from llmproxy.tools.doctor.look import Replica
from llmproxy.tools.terminal import printable

SESSION_PLACEMENTS = frozenset(
    {
        "session",
        "consistent_hash",
        "consistent_hashing",
        "rendezvous_hash",
        "sticky_least_loaded",
        "manual",
        "ip_hash",
        "hash",
    }
)
"""The names, in other routers, of placements that keep a session on one replica."""


class NotReadError(Exception):
    """The text is not the configuration of a known router. The message names the known routers."""


class Carried(Struct):
    """The settings of another router, as keys of llmproxy."""

    # The name of the other router.
    router: str
    # URLs of servers, as `ROLE=URL` for the roles prefill and decode.
    backends: list[str] = field(default_factory=list)
    # Dotted key -> value.
    keys: dict[str, Any] = field(default_factory=dict)
    # Alias of a model -> names of the models behind it.
    aliases: dict[str, list[str]] = field(default_factory=dict)
    # Whether its servers, and its clients, needed an API key.
    servers_key: bool = False
    clients_key: bool = False
    # The settings that have no equivalent, with reasons.
    left: list[str] = field(default_factory=list)

    def leave(self, what: str, why: str = "") -> None:
        """Notes that a setting has no equivalent. `what` names the setting."""
        self.left.append(printable(what) + (f": {printable(why)}" if why else ""))

    def add_backend(self, text: str) -> None:
        """Adds a server once. An unusable URL is left out with the reason."""
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

    def leave_foreign(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Leaves servers out that may belong to others, and returns the rest."""
        for replica in replicas:
            if replica.foreign:
                self.leave(replica.backend.url, replica.foreign)
        return [replica for replica in replicas if not replica.foreign]

    def set(self, key: str, value: Any, written: str) -> None:
        """Sets the key `key` if `value` is valid for it, otherwise notes the reason.

        `written` is the setting as the other router has it.
        """
        try:
            config = load(None, [Override(key, value if isinstance(value, list) else str(value), written)])
        except ConfigError as error:
            self.leave(written, error.problems[0].removeprefix(f"{written}: "))
            return
        found = attrgetter(key)(config)
        self.keys[key] = list(found) if isinstance(found, tuple) else found

    def carry_placement(self, placement: str, name: str) -> None:
        """Sets the placement `session` if the other router's `placement` keeps sessions on one replica.

        The default suits all other placements. `name` is the other router's name of the setting.
        """
        if placement.lower().replace("-", "_") in SESSION_PLACEMENTS:
            self.set("scheduling.placement", "session", name)
        else:
            self.leave(name, "the default placement `cost` weighs queues, cached prefixes and adapters")


def pods_url(selector: str, port: str, namespace: str = "", role: str = "") -> str:
    """Returns the URL of pods by their labels. `selector` has the labels, separated by commas or spaces."""
    labels = ",".join(re.split(r"[\s,]+", selector.strip()))
    return f"{role and role + '='}kubernetes+http://{namespace and namespace + '/'}pods/{labels}:{port}"
