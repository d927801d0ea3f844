"""Reads from the bytes of a broken stream which part of the answer the client has received."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from llmproxy.gateway.proxying.answers import parsed_events
from llmproxy.gateway.proxying.sse import BOM
from llmproxy.gateway.request.json_scan import Slices

_HEAD = ("id", "created", "model", "system_fingerprint")


class Sent(Struct):
    """The part of a chat or completion stream that the client has received. Only whole events count."""

    # The members that are equal in all events of a stream, such as `id`.
    head: dict[str, Any] = {}
    text: str = ""
    # The number of tokens of `text`, and of the white space at its end. Without ids, an event counts as one token.
    tokens: int = 0
    space_tokens: int = 0
    # Whether the last token before that white space ends with white space itself, such as `.\n`.
    space_torn: bool = False
    # The number of tokens after `text`: of a character that is not complete, so that its text was not sent.
    held_tokens: int = 0
    # The token ids of the prompt and of `text`. None unless the client asked the engine for them; `ids` is also None if
    # the last event had several ids, because the last id may end inside a character.
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    # All token ids that the client has received. `held_ids` are only the ids after `text`.
    all_ids: list[int] = []
    held_ids: list[int] = []
    # The indices of the choices whose role was sent.
    roles: set[int] = set()
    # Whether the end of the text was sent.
    finished: bool = False
    # Whether the usage of the whole answer was sent.
    counted: bool = False
    # The name of the first part that is no text, such as a tool call, reasoning, log probabilities or a second choice.
    # Empty if there is none.
    other: str = ""

    @property
    def empty(self) -> bool:
        """Whether the client has received nothing but white space, so that the answer can begin again."""
        return not (self.tokens - self.space_tokens or self.finished or self.other)


def read_sent(raw: bytes) -> Slices[Sent | None]:
    """Returns the part of a stream in `raw`, None if its events have an unknown shape.

    A generator: it yields every few events, so that no step takes more than 2 ms.
    """
    sent = Sent(head={}, roles=set(), all_ids=[])
    text: list[str] = []
    # The ids of the text, and the ids after it. The engine holds back the text of a character that is not complete.
    ids: list[int] = []
    new_ids: list[int] = []
    try:
        for events in parsed_events(raw.removeprefix(BOM)):
            for event in events:
                sent.head = sent.head or {name: event[name] for name in _HEAD if name in event}
                sent.prompt_ids = sent.prompt_ids or _prompt_ids(event)
                sent.counted = sent.counted or (not event["choices"] and bool(event.get("usage")))
                for choice in event["choices"]:
                    piece = _text_of(choice, sent)
                    if piece is None:
                        continue
                    text.append(piece)
                    own_ids = choice.get("token_ids") or ()
                    new_ids += own_ids
                    sent.all_ids += own_ids
                    sent.held_tokens += max(1, len(own_ids))
                    if piece:
                        sent.tokens += sent.held_tokens
                        sent.space_tokens = 0 if piece.strip() else sent.space_tokens + sent.held_tokens
                        if piece.strip():
                            sent.space_torn = piece[-1].isspace()
                        ids += new_ids
                        new_ids, sent.held_tokens = [], 0
                        # The last of several ids may end inside a character.
                        sent.ids = ids if len(own_ids) == 1 else None
            yield
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    sent.text, sent.held_ids = "".join(text), new_ids
    return sent


def _prompt_ids(event: dict[str, Any]) -> list[int] | None:
    """Returns the token ids of the prompt, None if the event has none.

    They are in the event of a chat, and in the choice of a completion.
    """
    for holder in (event, *event["choices"]):
        if holder.get("prompt_token_ids"):
            return list(holder["prompt_token_ids"])
    return None


def _text_of(choice: dict[str, Any], sent: Sent) -> str | None:
    """Returns the text of a choice, None for an event without a token.

    Notes in `sent` its role, its end, and any part that is no text.
    """
    delta = choice.get("delta", choice)
    if delta is not choice:
        for name, value in delta.items():
            if name not in ("role", "content") and value:
                sent.other = sent.other or name
    for name in ("logprobs", "prompt_logprobs"):
        if choice.get(name):
            sent.other = sent.other or name
    text: str = delta.get("content" if delta is not choice else "text") or ""
    if choice["index"] != 0 and text:
        sent.other = sent.other or "several choices"
    sent.finished = sent.finished or choice.get("finish_reason") is not None
    if delta.get("role"):
        sent.roles.add(choice["index"])
    return text if text or not delta.get("role") else None
