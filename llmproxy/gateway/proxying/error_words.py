"""Reads the cause of a failure from the error answers and error events of engines and other routers.

The module knows OpenAI's errors (numeric or text `code`, or `type` alone), errors of vLLM before 0.10 (`"object":
"error"`), FastAPI's `detail`, Anthropic's errors, and errors of the responses API.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from llmproxy.core.retry import Cause, cause_of

_BYTES_MAX = 64 << 10
_LIKELY = re.compile(rb'"(?:error|object|type|response)"\s*:')
_BEGINNING_CHARS = 64
_DEAD = re.compile(
    r"EngineCore encountered an issue|Engine(?:Core)?(?:Dead|Died)|engine (?:loop|core)? ?(?:is|has) (?:dead|died)"
    r"|background loop (?:has errored|is not running)",
    re.IGNORECASE,
)
# These sentences may have any code: vLLM's streams give some errors of the engine the code 400. No text of a client
# begins a message with them.
_DEAD_SENTENCE = re.compile(r"EngineCore encountered an issue|Background loop has errored")
_DRAINING = "cannot schedule new futures"
"""Text in the answer with status 500 from a vLLM that is shutting down, although its /health is still 200."""
ABORT = b'"abort"'
ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')  # The end of all answers of a vLLM that shuts down.
END_MARK = b"[DONE]"  # The end of a stream. If no `finish_reason` came before it, vLLM shuts down.
_NO_MODEL = re.compile(r"model.{0,300}?(?:does not exist|not found|is not (?:available|loaded|served))", re.I | re.S)
_NOT_LETTERS = re.compile(r"[^a-z]+")
# Only letters are compared, so that `BadRequestError`, `Bad Request` and `bad_request_error` are one word.
_WORDS = (
    (re.compile(r"authentication|permission|unauthorized|forbidden|apikey"), Cause.UNAUTHORIZED),
    (re.compile(r"ratelimit|overloaded|serviceunavailable|insufficientquota|toomanyrequests"), Cause.BUSY),
    (re.compile(r"modelnotfound"), Cause.NOT_SERVED),
    (re.compile(r"timeout"), Cause.OVERRAN),
    (
        re.compile(
            r"^(?:invalid|badrequest|unsupported|unprocessable|validation|valueerror|notfound|missing|unknownparameter"
            r"|string|image|emptyimage|failedtodownloadimage)|contextlength|contextwindow|toolong|toolarge"
            r"|contentfilter|contentpolicy|policyviolation|exceedsmax"
        ),
        Cause.REJECTED,
    ),
)


def answer_cause(status: int, body: bytes, *, own_key: bool) -> Cause:
    """Returns the cause of a failed answer by its status and body.

    `own_key`: the request carried the proxy's key, so a refused key is no error of the client.
    """
    cause = cause_of(status, own_key=own_key)
    if cause is Cause.ERROR:
        return _engine_cause(body)
    if status == 404:
        error = error_in(body) or {}
        named = error.get("param") == "model" or _letters(error.get("code")) == "modelnotfound"
        # A 404 for an unknown path or an unknown stored response has another message.
        return Cause.NOT_SERVED if named or _NO_MODEL.search(str(error.get("message", ""))) else cause
    return cause


def event_cause(data: bytes, *, own_key: bool = True) -> Cause:
    """Returns the cause of an error event in an answer with status 200.

    An unknown error counts as an error of the engine. `own_key`: the request carried the proxy's key, so a refused key
    is no error of the client.
    """
    if data == END_MARK or ABORTED.search(data):
        return Cause.DRAINING
    error = error_in(data) or {}
    if _DEAD.search(str(error.get("type"))) or _DEAD_SENTENCE.match(str(error.get("message"))):
        return Cause.ENGINE_DEAD
    for name in ("code", "status", "status_code"):
        number = str(error.get(name, ""))
        if re.fullmatch(r"[45]\d\d", number):
            return answer_cause(int(number), data, own_key=own_key)
    for name in ("code", "status", "type"):
        word = _letters(error.get(name))
        for pattern, cause in _WORDS:
            if pattern.search(word):
                return Cause.REJECTED if cause is Cause.UNAUTHORIZED and not own_key else cause
    return _engine_cause(data)


def _engine_cause(data: bytes) -> Cause:
    """Returns the cause of an error of the engine: DRAINING or ENGINE_DEAD if the words say so, otherwise ERROR.

    Only the type and the beginning of the message count, because a message may repeat the words of the client.
    """
    error = error_in(data) or {"message": data[:_BEGINNING_CHARS].decode(errors="replace")}
    words = f"{error.get('type')} {str(error.get('message'))[:_BEGINNING_CHARS]}"
    if _DRAINING in words:
        return Cause.DRAINING
    return Cause.ENGINE_DEAD if _DEAD.search(words) else Cause.ERROR


def error_in(data: bytes) -> dict[str, Any] | None:
    """Returns the error object in the JSON of an answer or an event; None if there is none, or the JSON is too long."""
    if len(data) > _BYTES_MAX or not _LIKELY.search(data):
        return None
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    response = fields.get("response")
    for holder in (fields, response if isinstance(response, dict) else {}):
        error = holder.get("error")
        if isinstance(error, dict):
            return error
        if isinstance(error, str) and error:
            return {"message": error, **{name: fields.get(name) for name in ("code", "status", "type")}}
    return fields if "error" in (fields.get("object"), fields.get("type")) else None


def _letters(value: object) -> str:
    return _NOT_LETTERS.sub("", value.lower()) if isinstance(value, str) else ""
