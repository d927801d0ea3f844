"""A request at a simulated server, and the exceptions of a request that fails there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from llmproxy.lab.simulator.engine.sequence import EngineRequest


class Broken(Exception):  # noqa: N818 - an event of the simulation, not an error of this code
    """The connection ended before the answer. `by_timeout`: the proxy closed it after a timeout."""

    def __init__(self, by_timeout: bool = False) -> None:
        super().__init__()
        self.by_timeout = by_timeout


class TransferFailed(Exception):  # noqa: N818
    """A request's KV cache could not be read from another server: an error before the first token."""


class Refusing(Exception):  # noqa: N818
    """The connection was refused: no process listens."""


class Leaving(Exception):  # noqa: N818
    """The server drains: it completes its running requests and accepts no new requests."""


class TooLong(Exception):  # noqa: N818
    """The request is longer than the context of this server, which answers 400."""


@dataclass(slots=True, eq=False)
class ServerJob:
    """A request at a replica, from its arrival there to its end. Times are on the clock of the virtual event loop."""

    request: EngineRequest
    # Called when the first token of the answer exists.
    on_first: Callable[[], None]
    # Set after the last token, or fails with `Broken` or `TransferFailed`.
    ended: asyncio.Future[None]
    # Cached prompt tokens; None before the engine admits the request.
    hit_tokens: int | None = None
    # Time of the first token; None before it.
    first_s: float | None = None
    # Whether the fault `reset` will cut the answer in mid-stream.
    cut_short: bool = False
    # Output tokens that the proxy has counted, and `heard_s`, the time at which they last increased.
    heard_tokens: int = 0
    heard_s: float = 0.0

    def break_off(self, by_timeout: bool = False) -> None:
        """Breaks the connection of the request. Does nothing after the end of the answer."""
        if not self.ended.done():
            self.ended.set_exception(Broken(by_timeout))
