"""The tokens and texts of answers, which follow from their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from llmproxy.lab.simulator.server import numbered
from llmproxy.lab.simulator.server.text import (
    TOKEN_BYTES,
    WRONG_WORD,
    bytes_of,
    packed,
    seed_of,
    text_of,
    tokens_of,
    words,
    words_at_end,
)

Join = Literal["same", "split", "repeat"]
EOS = 0  # The last token of a numbered answer that ends by itself. It has no text.
_CHARACTER_TOKENS = 4  # The most tokens that have bytes of the same character.


class AnswerText(Protocol):
    """An answer. `done` counts its tokens that an earlier engine has written, so that the prompt contains them."""

    seed: int
    done: int = 0
    ends_at: int | None = None  # Index of the token that ends the answer by itself, once it is known.
    stop_reason: str | None = None  # The stop string that ends the answer.

    def tokens(self, first: int, end: int) -> tuple[int, ...]: ...
    def text(self, first: int, end: int) -> str: ...


class Words(AnswerText):
    """An answer of pseudo-words, which follow from the prompt; if the prompt ends with the beginning of this answer,
    only its rest.
    """

    def __init__(self, prompt: Sequence[int], model: str, choice: int) -> None:
        self.seed = seed_of(prompt, model, choice)
        if not words_at_end(bytes_of(prompt[-2:])):
            return
        data = bytes_of(prompt)
        count = words_at_end(data)
        begun = data[len(data) - TOKEN_BYTES * count :].decode()
        # Token ids end with the ids of the words. Text behind a text without a whole number of tokens has other tokens.
        asked = prompt[: len(prompt) - count]
        if bytes_of(asked) + begun.encode() != data:
            asked = tokens_of(text_of(prompt)[: -len(begun)])
        seed = seed_of(asked, model, choice)
        if words(seed, 0, count) == begun:
            self.seed, self.done = seed, count

    def tokens(self, first: int, end: int) -> tuple[int, ...]:
        return tokens_of(self.text(first, end))

    def text(self, first: int, end: int) -> str:
        return words(self.seed, self.done + first, self.done + end)


class Wrong(Words):
    """An answer that was computed from KV of another prompt."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def text(self, first: int, end: int) -> str:
        return WRONG_WORD * (end - first)


class Numbered(AnswerText):
    """A numbered answer; if the prompt ends with the beginning of this answer, only its rest.

    The beginning may end within a token. Then the other bytes of this token come first, as tokens of four bytes. `join`
    says what follows a prompt that has the text of the beginning, but other tokens. With `split`, the next token
    becomes other tokens of the same text. With `repeat`, the last token of the prompt, or its part, is written again.
    """

    def __init__(self, prompt: Sequence[int], model: str, choice: int, join: Join = "same") -> None:
        self._prompt = prompt
        self.seed = seed_of(prompt, model, choice)
        number, part = 0, b""
        for start in range(len(prompt) - 1, -1, -1):
            if prompt[start] >= numbered.FIRST_ID and numbered.number_of(prompt[start]) == 0:
                seed = seed_of(prompt[:start], model, choice)
                if (found := _progress(seed % numbered.TAGS, bytes_of(prompt[start:]))) is not None:
                    self.seed, (number, part) = seed, found
                break
        self._tag = self.seed % numbered.TAGS
        rest = b""
        if join == "repeat" and number:
            number -= not part
        elif part or (join == "split" and number):
            rest = numbered.bytes_of(numbered.token_id(self._tag, number))[len(part) :]
            number += 1
        self._rest = packed(rest)
        self.done = number - len(self._rest)

    def tokens(self, first: int, end: int) -> tuple[int, ...]:
        numbers = range(self.done + max(first, len(self._rest)), self.done + end)
        tokens = (*self._rest[first:end], *(numbered.token_id(self._tag, number) for number in numbers))
        return (*tokens[:-1], EOS) if self.ends_at is not None and first <= self.ends_at < end else tokens

    def text(self, first: int, end: int) -> str:
        """Returns the text that tokens `first` to `end`, exclusive, add to the answer.

        As in vLLM, a token that ends within a character has no text, and the next token has the text of both. After a
        prompt that ends within a character, the first text contains the whole prompt.
        """
        first, end = self._shown(first), self._shown(end)
        if first == 0 < end and _ends_within_a_character(self._prompt[-_CHARACTER_TOKENS:]):
            return text_of((*self._prompt, *self.tokens(0, end)))
        return text_of(self.tokens(first, end))

    def _shown(self, count: int) -> int:
        """Returns how many tokens have been shown as text when `count` tokens exist."""
        while count > 0:
            latest = self.tokens(max(count - _CHARACTER_TOKENS, 0), count)
            before = self._prompt[-_CHARACTER_TOKENS:] if count < _CHARACTER_TOKENS else ()
            if not _ends_within_a_character((*before, *latest)):
                break
            count -= 1
        return count


class Stopped(AnswerText):
    """An answer that may end at a stop string, after `length` tokens.

    As in vLLM, its text in a stream lags behind its tokens, by one character less than the longest stop string. If the
    stop string is `included` in the text, the text does not lag. Stop strings in the first `min_tokens` do not count.
    """

    def __init__(self, answer: AnswerText, length: int, stops: Sequence[str], included: bool, min_tokens: int) -> None:
        self.seed, self.done, self.length = answer.seed, answer.done, length
        self._answer = answer
        self._text = ""
        self._shown = [0]
        lag = 0 if included else max(map(len, stops)) - 1
        for number in range(length):
            before = len(self._text)
            self._text += answer.text(number, number + 1)
            found = [(self._text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in stops]
            at, stop = next((one for one in found if one[0] >= 0), (-1, ""))
            if at >= 0 and number >= min_tokens:
                self._text = self._text[: at + len(stop) * included]
                self.stop_reason, self.length = stop, number + 1
                break
            self._shown.append(max(len(self._text) - lag, 0))
        self._shown[self.length :] = [len(self._text)]

    def tokens(self, first: int, end: int) -> tuple[int, ...]:
        return self._answer.tokens(first, end)

    def text(self, first: int, end: int) -> str:
        return self._text[self._shown[first] : self._shown[end]]


def _progress(tag: int, data: bytes) -> tuple[int, bytes] | None:
    """Returns how many tokens of an answer `data` contains, and the bytes after them; None for another text."""
    number = at = 0
    while at < len(data):
        token = numbered.bytes_of(numbered.token_id(tag, number))
        if not data.startswith(token, at):
            return (number, data[at:]) if token.startswith(data[at:]) else None
        number += 1
        at += len(token)
    return number, b""


def _ends_within_a_character(tokens: Sequence[int]) -> bool:
    return text_of(tokens).endswith("\ufffd")
