"""Makes errors in the format of each API: a JSON body before the first byte of an answer, an SSE event after it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from math import ceil

import orjson
from aiohttp import web
from multidict import CIMultiDict

from llmproxy.core.domain import Outcome, Refused
from llmproxy.gateway.http.routes import MODELS, SCHEDULED, Dialect

STATUS: dict[Outcome, int] = {
    Outcome.BAD_REQUEST: 400,
    Outcome.UNKNOWN_MODEL: 404,
    Outcome.UNAUTHORIZED: 401,
    Outcome.TOO_LARGE: 413,
    Outcome.REJECTED_CAPACITY: 429,
    Outcome.REJECTED_NO_BACKENDS: 503,
    Outcome.EXPIRED: 429,
    Outcome.EXPIRED_NO_BACKENDS: 503,
    Outcome.SHED: 429,
    Outcome.REJECTED_DEADLINE: 429,
    Outcome.RATE_LIMITED: 429,
    Outcome.CANCELLED: 499,
    Outcome.CONNECT_FAILED: 502,
    Outcome.UPSTREAM_TIMEOUT: 504,
    Outcome.UPSTREAM_STATUS: 502,
    Outcome.BROKEN_STREAM: 502,
    Outcome.DRAINING: 503,
    Outcome.INTERNAL: 500,
}

INTERNAL_MESSAGE = "The proxy failed; its log has the details under this id."

_OPENAI_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    417: "ExpectationFailedError",
    426: "UpgradeRequiredError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    505: "HTTPVersionNotSupportedError",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Failure(Exception):  # noqa: N818 - an answer to a client, which need not be an error of this code
    """Ends a request with an answer of the proxy, before any byte of a backend's answer.

    `message` is for the client. `detail` is for the log only, because it may contain addresses of backends. `param`
    names the wrong field of the request. `status` is by default the status of the outcome in STATUS.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        status: int | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.detail = detail
        self.outcome = outcome
        self.message = message
        self.status = STATUS[outcome] if status is None else status
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, ceil(retry_after_s)))

    @classmethod
    def from_refused(cls, refused: Refused) -> Failure:
        return cls(refused.outcome, refused.message, retry_after_s=refused.retry_after_s)

    def response(self, dialect: Dialect, headers: Mapping[str, str]) -> web.Response:
        """Returns the answer with `headers`. Header fields of the failure itself take precedence."""
        body = error_body(dialect, self.status, self.message, self.param)
        fields = CIMultiDict({**headers, **self.headers})
        response = web.Response(status=self.status, body=body, content_type="application/json", headers=fields)
        if "close" in self.headers.get("Connection", ""):
            response.force_close()
        return response

    def raw(self) -> bytes:
        """Returns the whole HTTP answer as bytes, in OpenAI's format, for a connection that is closed after it."""
        body = error_body(Dialect.OPENAI, self.status, self.message, self.param)
        fields = {**self.headers, "Connection": "close", "Content-Length": len(body)}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        line = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\nContent-Type: application/json\r\n"
        return f"{line}{lines}\r\n".encode() + body


def nothing_at(path: str) -> Failure:
    """Returns the failure for a path that does not exist, or that this client may not see.

    Some SDKs add /v1 to their base URL, others expect it there. If a scheduled route or /v1/models has this
    path with one /v1 more or less, the message names it.
    """
    message = f"There is nothing at {path[:200]}."
    for similar in (f"/v1{path}", path.removeprefix("/v1")):
        if similar != path and (similar in SCHEDULED or similar == MODELS):
            message = f"There is nothing at {path}. Did you mean {similar}?"
    return Failure(Outcome.BAD_REQUEST, message, status=404)


def error_body(dialect: Dialect, status: int, message: str, param: str | None = None) -> bytes:
    """Returns the JSON body of an error. Its format is vLLM's, except on Anthropic's routes."""
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return _json({"type": "error", "error": {"type": kind, "message": message}})
    return _json({"error": error_fields(status, message, param)})


def _json(value: Mapping[str, object]) -> bytes:
    """Returns `value` as JSON. Surrogates, which represent bytes of a header that are no UTF-8, become `?`."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def error_fields(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """Returns the value of `error` in OpenAI's format, as vLLM writes it."""
    kind = _OPENAI_TYPES.get(status, "InternalServerError")
    return {"message": message, "type": kind, "param": param, "code": status}


def error_event(dialect: Dialect, message: str, status: int = 502) -> bytes:
    """Returns the SSE event of an error that ends a stream. `status`: the error's HTTP status, had no stream begun."""
    if dialect is Dialect.ANTHROPIC:
        return b"event: error\ndata: " + error_body(dialect, status, message) + b"\n\n"
    if dialect is Dialect.RESPONSES:
        event = {"type": "error", "code": "server_error", "message": message, "param": None}
        return b"event: error\ndata: " + _json(event) + b"\n\n"
    return b"data: " + error_body(dialect, status, message) + b"\n\n"
