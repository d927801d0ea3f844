"""Sends requests to the pages of a running proxy. Refusals become messages for people."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from llmproxy.gateway.http.routes import USAGE
from llmproxy.tools.terminal import printable

TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 16 << 20
"""More than any page of the proxy has. A longer answer comes from another program, and is not read to its end."""
LIVE = "/debug/live"
REQUESTS = "/debug/requests"
SCALE = "/scale"


class AskError(Exception):
    """The proxy gives no usable answer. The message says why."""


class UnreachableError(AskError):
    """No server answers at this address now, or the proxy asks to try again later."""


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """The address of a proxy, and the key for its pages; None without a key."""

    url: URL
    key: str | None = None

    @classmethod
    def parsed(cls, url: str, key: str | None) -> ProxyAddress:
        """Returns the address in a URL that a user typed, perhaps without `http://`.

        The path of the URL is dropped. Raises AskError for a bad URL or key.
        """
        full = url if "://" in url else f"http://{url}"
        try:
            base = URL(full)
            fine = base.scheme in ("http", "https") and bool(base.host)
        except ValueError:
            fine = False
        if not fine:
            raise AskError(f"{printable(url)} is no address; it should be like http://127.0.0.1:8080")
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise AskError("the key should be one line of printable ASCII characters without spaces")
        address = URL.build(scheme=base.scheme, host=base.host or "", port=base.port)
        return cls(address, key or None)

    def __str__(self) -> str:
        return printable(str(self.url))


class Asker:
    """A client of one proxy, over one HTTP session."""

    def __init__(self, target: ProxyAddress, session: aiohttp.ClientSession) -> None:
        self.target = target
        self._session = session

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Returns the JSON object at `path`. Raises AskError; UnreachableError if a later call may succeed."""
        target = self.target
        headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
        try:
            async with self._session.get(
                target.url.with_path(path), params=query, headers=headers, allow_redirects=False
            ) as answer:
                body, status = await self._body(answer), answer.status
                ours = answer.headers.get("Server") == "llmproxy"
        except TimeoutError:
            raise UnreachableError(f"{target} does not answer within {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"{target} is not reachable: {printable(cause(error))}") from None
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if status == 200 and isinstance(found, dict):
            return found
        raise self._refused(path, status, found, ours)

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        """Returns the body of an answer. Raises AskError if the body is too large."""
        parts, size = list[bytes](), 0
        async for part in answer.content.iter_any():
            size += len(part)
            if size > ANSWER_BYTES_MAX:
                raise AskError(f"{self.target} answers with more than {ANSWER_BYTES_MAX >> 20} MB; no llmproxy does")
            parts.append(part)
        return b"".join(parts)

    def _refused(self, path: str, status: int, found: object, ours: bool) -> AskError:
        target = self.target
        if not ours:
            return AskError(f"{target} is not an llmproxy: {path} gives {status}")
        error = found.get("error") if isinstance(found, dict) else None
        message = printable(str(error.get("message", ""))) if isinstance(error, dict) else ""
        if status == 404 and not message.startswith("There is nothing at"):
            return AskError(message)
        if status == 401 and path == USAGE:
            return AskError(f"{target} refuses this key: it wants the key of a tenant (--api-key, or OPENAI_API_KEY)")
        if status in (401, 403, 404):
            if target.key:
                return AskError(f"{target} refuses this admin key, or has no {path} on this port (admin_port)")
            return AskError(
                f"{target} shows {path} to those with its admin key (--admin-key); where it has none, to clients on its"
                " own machine; if it has an admin_port, only there"
            )
        # A proxy that starts, stops or limits requests will answer later.
        kind = UnreachableError if status == 429 or status >= 500 else AskError
        return kind(f"{target} answers {status}" + (f": {message}" if message else ""))


@asynccontextmanager
async def asking(target: ProxyAddress) -> AsyncIterator[Asker]:
    """Yields a client of one proxy, with one HTTP session for the block."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        yield Asker(target, session)


def cause(error: BaseException) -> str:
    """Returns the reason of a failed connection, for people."""
    inner = getattr(error, "os_error", None)
    return str((getattr(inner, "strerror", None) if inner else None) or error or type(error).__name__)
