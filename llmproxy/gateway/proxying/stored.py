"""Remembers which backend stores which response of the responses API, and serves requests about stored responses.

A request that fetches or cancels a stored response goes to its backend without waiting, because nothing is computed. A
request that continues a response (`previous_response_id`) waits for that backend: engines keep responses in their own
memory. After a restart of the proxy, the backends of older responses are unknown. Then a request that continues one
tries all backends, or gets 404 if tenants are configured.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from llmproxy.config import BackendConfig
from llmproxy.core.domain import Outcome, Refused
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.errors import Failure, error_event
from llmproxy.gateway.http.headers import to_client
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.call import Call
from llmproxy.gateway.proxying.relay import end_with_error
from llmproxy.gateway.proxying.response_writer import ResponseWriter, Server, within
from llmproxy.gateway.proxying.rules import Rulebook, Rules
from llmproxy.gateway.proxying.stream_relay import is_encoded, is_event_stream
from llmproxy.gateway.request.auth import NO_TENANT, Tenant
from llmproxy.gateway.request.json_scan import BadBody
from llmproxy.gateway.request.parsed_body import REQUEST_ID
from llmproxy.gateway.request.prefix_hash import PREVIOUS
from llmproxy.scheduling.attempt import Attempt
from llmproxy.scheduling.lease import Leasing
from llmproxy.upstream.port import ConnectFailed, LocalFailure, Upstream, UpstreamBroken

IDS_MAX = 10_000  # The maximum number of responses whose backend is remembered.


def _up_to(name: bytes) -> bytes:
    """Returns a pattern for the beginning of a JSON object: plain members, then the member `name` up to its value."""
    plain = rb'(?!"%b")"[^"\\]*+"\s*+:\s*+(?:"[^"\\]*+"|[-+.\w]++)\s*+,\s*+'
    return (rb"\s*+\{\s*+(?:" + plain + rb')*+"%b"\s*+:') % (name, name)


# Only a top-level id counts: an answer repeats instructions and metadata, which the client wrote.
_EVENT = rb"(?:(?:event|id|retry)?+:[^\r\n]*+[\r\n]++)*+data:" + _up_to(b"response")
_ID = re.compile(b"(?:" + _EVENT + b")?+" + _up_to(b"id") + rb'\s*+"(resp_[A-Za-z0-9_-]{1,256})"')


@dataclass(frozen=True, slots=True)
class Previous:
    """The stored response that a request continues."""

    id: str
    # The backend that stores the response; None if unknown.
    backend: str | None

    def may_be_elsewhere(self, attempt: Attempt) -> bool:
        """Returns whether another backend may store the response.

        This is so if the backend is unknown and this attempt got a 404.
        """
        return self.backend is None and attempt.status == 404

    def unreachable(self, refused: Refused) -> Failure:
        """Returns the failure (404) for a request whose response is lost, because its backend is gone."""
        message = (
            f"Response with id '{self.id[:200]}' is lost. {refused.message} Send the whole conversation as `input`."
        )
        return Failure(Outcome.BAD_REQUEST, message, status=404, param=PREVIOUS)


class StoredResponses:
    """Remembers the backend and the tenant of each response id.

    A response exists only for the tenant whose request made it first. Beyond IDS_MAX ids, the oldest id of the tenant
    with the most ids is forgotten.
    """

    def __init__(
        self, rulebook: Rulebook, backends: Mapping[str, BackendConfig], upstream: Upstream, dispatcher: Leasing
    ) -> None:
        self._rulebook = rulebook
        self._backends = backends
        self._upstream = upstream
        self._dispatcher = dispatcher
        self._made_by: dict[str, tuple[str, str]] = {}
        self._ids_of: dict[str, OrderedDict[str, None]] = {}
        # Number of ids -> the tenants with so many. The tenant with the most is found without a search of all.
        self._tenants_with: dict[int, dict[str, None]] = {}
        self._most = 0  # No tenant has more ids.
        # Called with id, backend and tenant of each response whose backend this process or its worker learned from an
        # answer.
        self.on_made: Callable[[str, str, str], None] = lambda *_: None
        # Called with id, backend and tenant of each response reported by the process that knows all responses.
        self.on_owner: Callable[[str, str, str], None] = lambda *_: None
        # Waits until this process knows the responses that other processes made before; None with one process.
        self.catch_up: Callable[[], Awaitable[None]] | None = None

    @property
    def made_by(self) -> Mapping[str, tuple[str, str]]:
        """Maps each response id to its backend and its tenant, the oldest first."""
        return self._made_by

    def remember(self, head: bytes, backend: str, tenant: Tenant = NO_TENANT) -> None:
        """Notes the response of `backend` whose first bytes are `head`, as JSON or as the first event of a stream.

        Does nothing if the bytes contain no response id.
        """
        found = _ID.match(head)
        if found is None:
            return
        self.made(found[1].decode(), backend, tenant)

    def made(self, response_id: str, backend: str, tenant: Tenant = NO_TENANT) -> None:
        """Notes a response whose backend this process has learned from an answer, and reports it by `on_made`."""
        if self.note(response_id, backend, tenant.name):
            self.on_made(response_id, backend, tenant.name)

    def note(self, response_id: str, backend: str, tenant: str, *, authoritative: bool = False) -> bool:
        """Notes the backend and the tenant of a response.

        Returns False, and changes nothing, if the response belongs to another tenant. `authoritative`: the report comes
        from the process that knows all responses, so its `tenant` always counts.
        """
        _, owner = self._made_by.get(response_id, ("", tenant))
        if owner != tenant:
            if not authoritative:
                return False
            del self._ids_of[owner][response_id]
            self._resized(owner, -1)
        self._made_by[response_id] = backend, tenant
        ids = self._ids_of.setdefault(tenant, OrderedDict())
        if response_id not in ids:
            ids[response_id] = None
            self._resized(tenant, 1)
        if len(self._made_by) > IDS_MAX:
            while self._most not in self._tenants_with:
                self._most -= 1
            largest, _ = self._tenants_with[self._most].popitem()
            first, _ = self._ids_of[largest].popitem(last=False)
            del self._made_by[first]
            self._resized(largest, -1)
        if authoritative:
            self.on_owner(response_id, backend, tenant)
        return True

    def _resized(self, tenant: str, by: int) -> None:
        """Notes that the number of ids of `tenant` has changed by `by`, 1 or -1."""
        size = len(self._ids_of[tenant])
        before = self._tenants_with.get(size - by)
        if before is not None:
            before.pop(tenant, None)
            if not before:
                del self._tenants_with[size - by]
        if size:
            self._tenants_with.setdefault(size, {})[tenant] = None
            self._most = max(self._most, size)
        else:
            del self._ids_of[tenant]

    def backend_for(self, response_id: str, tenant: Tenant = NO_TENANT) -> str | None:
        """Returns the backend that stores a response of `tenant`.

        Returns None if it is unknown, or if the response belongs to another tenant.
        """
        backend, owner = self._made_by.get(response_id, (None, tenant.name))
        return backend if owner == tenant.name else None

    async def _find_backend(self, response_id: str, tenant: Tenant) -> str | None:
        """Returns the backend of a response of `tenant`; None if unknown.

        First waits for the reports of other processes if this process does not know the response.
        """
        if response_id not in self._made_by and self.catch_up is not None:
            await self.catch_up()
        return self.backend_for(response_id, tenant)

    async def previous(self, members: Mapping[str, Any], tenant: Tenant, rules: Rules) -> Previous | None:
        """Returns the response that a request of `tenant` continues; None if it continues none.

        `members` are the members of the request body about stored responses. An id that is not a string is left to the
        engine, which refuses it. If tenants are configured, raises Failure: 404 unless the response is known to belong
        to the tenant, and 400 for a `request_id`, because an engine would store the new response under that id and
        could replace a response of another tenant.
        """
        owned = bool(rules.config.tenants)
        if owned and REQUEST_ID in members:
            message = "The field request_id is not taken here: leave it out, and the engine makes an id."
            raise BadBody(message, f"body.{REQUEST_ID}")
        response_id = members.get(PREVIOUS)
        if not isinstance(response_id, str):
            return None
        backend = await self._find_backend(response_id, tenant)
        if owned and backend is None:
            message = f"Response with id '{response_id[:200]}' not found."
            raise Failure(Outcome.BAD_REQUEST, message, status=404, param=PREVIOUS)
        return Previous(response_id, backend)

    def commit_callback(
        self, call: Call, attempt: Attempt, backend: str, tenant: Tenant, previous: Previous | None, stores: bool
    ) -> Callable[[], None]:
        """Returns a callback that notes the new response when its answer begins, before the client can use the id.

        `stores`: whether the engine stores the new response. If the answer is 2xx, a `previous` response whose backend
        was unknown is noted too.
        """

        def note() -> None:
            if stores:
                self.remember(call.head, backend, tenant)
            if previous is not None and previous.backend is None and 200 <= (attempt.status or 0) < 300:
                self.made(previous.id, backend, tenant)

        return note

    async def serve(
        self,
        path: str,
        request: web.BaseRequest,
        response_id: str,
        own_id: str,
        tenant: Tenant,
        sender: Client,
        server: Server,
    ) -> tuple[web.StreamResponse, Outcome, str | None]:
        """Forwards a request of `tenant` about a stored response, to the backend that has this response.

        `own_id` is the id of this request. Returns the response to the client, the outcome, and the error or None.
        Raises Failure.
        """
        name, rules = await self._find_backend(response_id, tenant), self._rulebook.current
        if name is None or name not in self._backends:
            message = f"Response with id '{response_id[:200]}' not found: no backend here is known to have made it."
            raise Failure(Outcome.BAD_REQUEST, message, status=404)
        backend = self._backends[name]
        extra = {"x-request-id": own_id}
        trusted = rules.identity.trusts(sender, tenant)
        if trusted or not tenant.name:
            extra["x-llmproxy-backend"] = name
        client = ResponseWriter(request, extra, server, rules.cors)
        headers = rules.identity.backend_headers(request, own_id, backend, trusted)
        query = request.rel_url.raw_query_string
        limit_s = rules.config.timeouts.stall_s
        exchange = None
        gone = ""

        def cut() -> None:
            nonlocal gone
            gone = "The backend is gone: the proxy gave up waiting."
            if not scope.expired():
                scope.reschedule(0.0)

        try:
            async with asyncio.timeout(rules.config.timeouts.total_s) as scope:
                with self._dispatcher.direct(name, cut):
                    try:
                        exchange = await self._upstream.open(
                            backend.url,
                            request.method,
                            f"{path}?{query}" if query else path,
                            headers,
                            (),
                            rules.config.timeouts.connect_s,
                        )
                        if not (200 <= exchange.status < 300 or exchange.status >= 400):
                            message = f"The backend answered {exchange.status}, which is not passed on."
                            raise Failure(Outcome.UPSTREAM_STATUS, message, status=502)
                        client.commit(exchange.status, exchange.reason, to_client(exchange.headers))
                        while data := await exchange.chunk():
                            client.write(data)
                            await within(client.drained(), client, limit_s)
                    finally:
                        if exchange is not None:
                            exchange.close()
                await within(client.end(), client, limit_s)
        except Refused as refused:
            raise Failure.from_refused(refused) from None
        except LocalFailure as error:
            raise Failure(
                Outcome.REJECTED_CAPACITY, error.message, status=503, retry_after_s=1.0, detail=str(error)
            ) from error
        except (ConnectFailed, UpstreamBroken, TimeoutError) as error:
            message = "The backend that made this response failed."
            if client.response is None:
                raise Failure(Outcome.CONNECT_FAILED, message, detail=gone or str(error)) from error
            if exchange is not None and not client.ended and is_event_stream(exchange) and not is_encoded(exchange):
                # The stream may have broken inside an event. A blank line ends the event, and is harmless elsewhere.
                await end_with_error(b"\n\n" + error_event(Dialect.RESPONSES, f"The stream broke: {message}"), client)
            else:
                await client.abort()
            return client.response, Outcome.BROKEN_STREAM, f"{message} {gone or error}"
        assert client.response is not None
        if client.status >= 400:
            return client.response, Outcome.UPSTREAM_STATUS, "the backend's own answer"
        return client.response, Outcome.COMPLETED, None
