"""What the gateway goes by, made from one configuration and replaced whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmproxy.config import Config
from llmproxy.core.placement import presets
from llmproxy.gateway.auth import Keys
from llmproxy.gateway.desk import Desk
from llmproxy.gateway.identity import Identity
from llmproxy.gateway.relay import Relay
from llmproxy.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may come in, what they are worth, how bodies are read and how attempts are made.

    A request keeps those under which it came until its end, so that it never meets half of one configuration and half
    of another.
    """

    config: Config
    keys: Keys
    identity: Identity
    desk: Desk
    relay: Relay
    band_names: Mapping[int, str]

    @classmethod
    def of(cls, config: Config, upstream: Upstream) -> Rules:
        identity = Identity(config)
        # For a placement that does not look at prefixes, prompts need not be hashed.
        prefixes = presets.reads_prefixes(config.scheduling.placement)
        desk = Desk(prefixes=prefixes, session_member=identity.session_member)
        return cls(config, Keys(config), identity, desk, Relay(upstream, config.timeouts), config.band_names())


@dataclass(slots=True)
class Rulebook:
    """The rules for requests that come now. A reload replaces them in one assignment."""

    current: Rules
