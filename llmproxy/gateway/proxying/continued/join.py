"""Joins the rest of a stream to the part that the client has received, so that both look like one answer."""

from __future__ import annotations

from typing import Any

import orjson
from msgspec import Struct

from llmproxy.gateway.http.errors import error_body
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.continued.rule import How, Rest
from llmproxy.gateway.proxying.continued.sent import Sent
from llmproxy.gateway.proxying.sse import BOM, EVENT_END, StreamTap, named_data

MARK = b": continued\n\n"
"""A comment before the first event of the rest. Clients ignore comments."""

AGAIN_CHARS = 24
"""If the rest begins with this many first characters of the answer, the engine has begun the answer again."""


class RestOf(Struct, frozen=True):
    """The part of an answer that the client has received, and the request for the rest."""

    sent: Sent
    rest: Rest
    # The instant on the loop's clock when the total time limit of the whole answer ends.
    end_s: float


class JoinedTap(StreamTap):
    """Reads the rest of a stream, and changes its events to events of the first stream.

    The events get the id of the first stream, the role is not sent again, and the usage covers the whole answer.
    """

    __slots__ = (
        "_beginning", "_begun", "_held", "_pending", "_repeated", "_rest", "_sent", "_space", "_text",
    )  # fmt: skip

    def __init__(self, hide_usage: bool, rest_of: RestOf) -> None:
        super().__init__(hide_usage, holds=True)
        self._sent, self._rest, self._space = rest_of.sent, rest_of.rest, rest_of.rest.space
        self._repeated = list(rest_of.rest.repeated)
        # Tokens without text, of an incomplete character, that the client has received and the engine generates again.
        self._held = self._sent.held_tokens
        # The beginning of the answer, while the text of the rest repeats it; then empty. Meanwhile `_pending` holds
        # events.
        known = self._sent.text.lstrip()[:AGAIN_CHARS]
        self._beginning = known if self._rest.how is How.TEXT and len(known) == AGAIN_CHARS else ""
        self._text, self._pending = "", b""
        self._begun = False  # Whether the client got the mark.

    def feed(self, data: bytes) -> bytes:
        return b"" if self.refused else self._joined(super().feed(data))

    def flush(self) -> bytes:
        return b"" if self.refused else self._joined(super().flush())

    def _joined(self, events: bytes) -> bytes:
        """Returns the given whole events of the rest as the client gets them."""
        if not events:
            return b""
        out = [] if self._begun else [MARK]
        self._begun = True
        for event in EVENT_END.split(events):
            name, data = named_data(event.removeprefix(BOM))
            if data and data != b"[DONE]":
                data = self._event(data)
                if self.refused:
                    break
                if data:
                    out.append((b"event: %b\n" % name if name else b"") + b"data: " + data + b"\n\n")
            elif event.strip():
                out.append(event + b"\n\n")
        return self._goes_on(b"".join(out))

    def _goes_on(self, events: bytes) -> bytes:
        """Holds the first events of the rest until it is clear whether the engine has begun the answer again.

        An engine that does not know `continue_final_message` ignores it, and begins again. Then the rest is refused.
        """
        if not self._beginning or self.refused:
            return events
        text = self._text.lstrip()
        if text.startswith(self._beginning):
            self._refuse(400, "it begins the answer again")
            return b""
        self._pending += events
        if self._beginning.startswith(text) and not (self.finished or self.done_seen):
            return b""
        self._beginning = ""
        return self._pending

    def _event(self, payload: bytes) -> bytes:
        """Returns the changed data of an event, empty if the client has received all of it already.

        Also empty if the event does not fit, which refuses the rest.
        """
        try:
            event = orjson.loads(payload)
            event |= {name: value for name, value in self._sent.head.items() if name in event}
            begun = bool(event["choices"])
            event["choices"] = [choice for choice in event["choices"] if self._keeps(choice)]
            if not event["choices"] and (begun or (event.get("usage") and self._sent.counted)):
                return b""
            if event.get("usage"):
                self._add(event["usage"])
            if self._sent.prompt_ids:
                event.pop("prompt_token_ids", None)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # With this status no other backend is asked, because it would answer likewise.
            self._refuse(400, str(error))
            return b""
        return orjson.dumps(event)

    def _refuse(self, status: int, why: str) -> None:
        """Relays nothing more of the rest, and ends the answer with an error event of this status."""
        self.error = error_body(Dialect.OPENAI, status, f"The rest does not go on with the answer: {why}")
        self.error_seen = self.refused = True
        self.held_back[:] = b"data: " + self.error + b"\n\n"

    def _keeps(self, choice: dict[str, Any]) -> bool:
        """Removes the parts of a choice that the client has received. Returns whether something is left.

        Raises ValueError if the rest does not fit the answer so far.
        """
        sent = self._sent
        delta = choice.get("delta", choice)
        self.finished = self.finished or choice.get("finish_reason") is not None
        # An event without text, role and end is a token of a character that is not complete. It counts.
        is_token = not delta.get("role")
        if delta is not choice and delta.get("role"):
            if choice["index"] in sent.roles:
                del delta["role"]
            sent.roles.add(choice["index"])
        if delta is not choice and not sent.empty and (delta.get("reasoning") or delta.get("reasoning_content")):
            raise ValueError("it begins to reason")
        if sent.prompt_ids and delta is choice:
            choice["prompt_token_ids"] = None
        if self._rest.text_ended:
            if choice.get("finish_reason") is None or sent.finished:
                return False
            delta |= {name: "" for name in ("text", "content") if name in delta}
            choice["finish_reason"], choice["token_ids"] = "length", None
            return True
        if self._beginning:
            self._text += delta.get("text") or delta.get("content") or ""
        if self._space:
            is_token = not self._remove_space(delta) and is_token
        text = delta.get("text") or delta.get("content")
        self._held = 0 if text else self._held
        if self._held and is_token and not choice.get("token_ids") and choice.get("finish_reason") is None:
            self._held -= 1
            return False
        if self._repeated and choice.get("token_ids") and not self._remove_ids(choice):
            return bool(delta.get("text") or delta.get("content") or choice.get("finish_reason"))
        if delta is choice or is_token or choice.get("token_ids") or choice.get("finish_reason") is not None:
            return True
        return any(delta.values())

    def _remove_space(self, delta: dict[str, Any]) -> bool:
        """Removes white space that the client has received, or a space that the engine wrote in its place.

        Returns whether anything was removed.
        """
        name = "text" if "text" in delta else "content"
        text = whole = delta.get(name) or ""
        if self._space == self._rest.space and text[:1] == " " and self._space[0] != " ":
            # The new prompt has no line breaks at its end, so the engine begins the next word with a space.
            text, self._space = text[1:], ""
        while text and self._space and text[0] == self._space[0]:
            text, self._space = text[1:], self._space[1:]
        if text:
            self._space = ""
        if name in delta:
            delta[name] = text
        return text != whole

    def _remove_ids(self, choice: dict[str, Any]) -> bool:
        """Removes token ids that the client has received. Returns whether some are left.

        Raises ValueError if the engine has generated other ids.
        """
        ids = choice["token_ids"]
        again = self._repeated[: len(ids)]
        if ids[: len(again)] != again:
            raise ValueError("it has other tokens")
        self._repeated, choice["token_ids"] = self._repeated[len(again) :], ids[len(again) :]
        return len(ids) > len(again)

    def _add(self, usage: dict[str, Any]) -> None:
        """Changes the usage of the rest to the usage of the whole answer.

        The text so far, which was a part of the prompt of the rest, is counted as output.
        """
        rest, sent = self._rest, self._sent
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if prompt is None or output is None:
            return
        # An engine may read the text so far as fewer tokens than were written.
        usage["prompt_tokens"] = len(sent.prompt_ids) if sent.prompt_ids else max(1, prompt - rest.tokens)
        if sent.finished:
            usage["completion_tokens"] = sent.tokens + sent.held_tokens
        else:
            usage["completion_tokens"] = rest.tokens + (0 if rest.text_ended else output)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
