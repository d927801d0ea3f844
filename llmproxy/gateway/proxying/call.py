"""A call to a backend, and its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmproxy.core.domain import Stage, Usage
from llmproxy.core.kv_connectors import KvConnector, Parameters
from llmproxy.gateway.http.headers import Headers
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.continued.join import RestOf
from llmproxy.gateway.proxying.deadlines import Timed
from llmproxy.gateway.proxying.error_words import error_in
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.upstream.port import Body

_INPUT = re.compile(rb"""['"]input\\?['"]""")


@dataclass(frozen=True, slots=True)
class Answer:
    """An error answer of a backend, which the client gets if no other attempt is made."""

    status: int
    reason: str
    headers: Headers
    body: bytes


class Call(Timed, eq=False):
    """A request to a backend: the bytes to send, the time limits, how to treat the answer, and the answer's kept parts.

    Of the fields of this class, those before `answer` never change.
    """

    method: str
    path_qs: str
    headers: Headers
    body: Body
    # Whether usage events are kept from the client, because the proxy and not the client asked for them.
    hide_usage: bool
    dialect: Dialect
    # The upper bound for the usage of the answer; None if the answer is free.
    usage_max: Usage | None
    stage: Stage = Stage.WHOLE
    # Reads the answer to a prefill, which does not go to the client. None for any other call.
    connector: KvConnector | None = None
    # The number of events that only announce the stream. The answer is buffered until more events have come.
    opening_events: int = 0
    # Whether the call continues for a moment after the client has left, so that the engines free the KV blocks of the
    # prompt.
    released: bool = False
    # Whether the request carries the proxy's own key, or no key, and not the client's key.
    own_key: bool = True
    # Whether the backend lists the model, so that "unknown model" is the backend's error and not the client's.
    listed: bool = True
    # Whether another backend may continue the stream or repeat the answer. Then only whole events are relayed, an error
    # event is held back, and an answer without a stream is held until it is complete or has HELD_BYTES_MAX bytes.
    holds: bool = False
    # Whether the backend is external, so that no other backend can continue its answer.
    external: bool = False
    # For a call that continues a broken stream, the part that the client already has; None for any other call.
    rest_of: RestOf | None = None

    # The backend's own error answer; None if there is none.
    answer: Answer | None = None
    # The first bytes of the answer. Without a stream, also the last bytes, and the number of all bytes.
    head: bytes = b""
    tail: bytes = b""
    answer_bytes: int = 0
    # When the last bytes of a stream came, on the clock `now`.
    last_byte_s: float = 0.0
    # The KV transfer parameters in the answer to a prefill.
    parameters: Parameters | None = None
    # The reader of the answer's events; None without an uncompressed event stream.
    tap: StreamTap | None = None

    def refuses(self, member: str) -> bool:
        """Returns whether the backend answered 400 or 422 and names this `member` of the request body as the cause.

        Many engines repeat the request as the `input` of their error. So the text after this word proves nothing.
        """
        if self.answer is None or self.answer.status not in (400, 422):
            return False
        param = (error_in(self.answer.body) or {}).get("param")
        return member in str(param) or member.encode() in _INPUT.split(self.answer.body, 1)[0]
