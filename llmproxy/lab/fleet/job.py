"""One request at a simulated server, and the ways in which a server refuses or breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from llmproxy.lab.simulator.engine.sequence import EngineRequest


class Broken(Exception):  # noqa: N818 - an event of the simulation, not an error of this code
    """The connection of an answer ended before the answer did; `by_timeout` when the proxy itself gave it up."""

    def __init__(self, by_timeout: bool = False) -> None:
        super().__init__()
        self.by_timeout = by_timeout


class TransferFailed(Exception):  # noqa: N818
    """The KV that a request needs from another server could not be had: an error before the first token."""


class Refusing(Exception):  # noqa: N818
    """No process listens."""


class Leaving(Exception):  # noqa: N818
    """The server is about to stop: it ends what it has and takes nothing new."""


class TooLong(Exception):  # noqa: N818
    """The request is longer than this server's context: its own 400."""


@dataclass(slots=True, eq=False)
class ServerJob:
    """One request at a replica. `ended` is set when the last token is out, or fails with `Broken`.

    `on_first` is called when the first token exists. Times are the loop's; `first_s` is None before the first token.
    `heard_tokens` is how much of the answer its proxy has counted, and `heard_s` when that last grew.
    """

    request: EngineRequest
    on_first: Callable[[], None]
    ended: asyncio.Future[None]
    hit_tokens: int | None = None
    first_s: float | None = None
    cut_short: bool = False
    heard_tokens: int = 0
    heard_s: float = 0.0

    def break_off(self, by_timeout: bool = False) -> None:
        """The connection is gone; nothing where the answer has ended."""
        if not self.ended.done():
            self.ended.set_exception(Broken(by_timeout))
