"""The tokens of numbered text, and answers that go on from any of their characters and tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.lab.simulator.server import numbered
from llmproxy.lab.simulator.server.answer_text import Join, Numbered
from llmproxy.lab.simulator.server.text import text_of, tokens_of
from tests.numbered import fault_in

PROMPT = "Count, please: é"
LENGTH = 260
ANSWER = Numbered(tokens_of(PROMPT), "base", 0)
TEXT = ANSWER.text(0, LENGTH)


def test_ids_and_text_of_an_answer_give_each_other() -> None:
    assert fault_in(TEXT) is None
    assert tokens_of(PROMPT + TEXT) == tokens_of(PROMPT) + ANSWER.tokens(0, LENGTH)
    assert text_of(ANSWER.tokens(0, LENGTH)) == TEXT


def test_characters_are_split_at_each_of_their_bytes() -> None:
    split = {
        (first[first.index(b"~") + 3 :], second[: second.index(b" ")])
        for first, second in (
            [numbered.bytes_of(numbered.token_id(7, number + more)) for more in (0, 1)]
            for number in range(6, LENGTH, 7)
        )
    }
    characters = [character.encode() for character in "ü€😀"]
    assert split == {(one[:cut], one[cut:]) for one in characters for cut in range(1, len(one))}


@given(at=st.integers(len(" 0~ba"), len(TEXT)), join=st.sampled_from(["same", "split"]))
def test_text_goes_on_at_any_character(at: int, join: Join) -> None:
    rest = Numbered(tokens_of(PROMPT + TEXT[:at]), "base", 0, join)
    assert (TEXT[:at] + rest.text(0, 2 * LENGTH)).startswith(TEXT)
    assert fault_in(TEXT[:at] + rest.text(0, LENGTH)) is None


@given(at=st.integers(1, LENGTH), first=st.integers(0, 10), more=st.integers(0, 10))
def test_ids_go_on_at_any_token(at: int, first: int, more: int) -> None:
    rest = Numbered(tokens_of(PROMPT) + ANSWER.tokens(0, at), "base", 0)
    assert rest.tokens(first, first + more) == ANSWER.tokens(at + first, at + first + more)
    parts = "".join(rest.text(number, number + 1) for number in range(first + more))
    assert parts == rest.text(0, first + more) == rest.text(0, first) + rest.text(first, first + more)
    if at % 7:
        assert parts == ANSWER.text(at, at + first + more)
    elif first + more:
        # As in vLLM: behind a prompt that ends within a character, the text begins with the prompt.
        assert parts == PROMPT + ANSWER.text(0, at + first + more)


@given(first=st.integers(5, len(TEXT)), second=st.integers(1, 20))
def test_a_continued_answer_can_be_continued(first: int, second: int) -> None:
    """Its tokens may differ from the tokens of the whole answer."""
    prompt = tokens_of(PROMPT + TEXT[:first])
    rest = Numbered(prompt, "base", 0)
    text = TEXT[:first] + rest.text(0, second)
    again = Numbered((*prompt, *rest.tokens(0, second)), "base", 0)
    after = again.text(0, 5)
    whole = text + after.removeprefix(PROMPT + text) if after.startswith(PROMPT) else text + after
    assert ANSWER.text(0, 2 * LENGTH).startswith(whole)


@pytest.mark.parametrize(
    ("prompt", "other"),
    [
        ("another prompt", TEXT[:40]),
        (PROMPT, TEXT[:40] + " and"),
        (PROMPT, TEXT[5:40]),
        (PROMPT, TEXT[:20] + TEXT[25:40]),
    ],
)
def test_other_text_at_the_end_of_a_prompt_is_no_answer(prompt: str, other: str) -> None:
    begun = Numbered(tokens_of(prompt + other), "base", 0)
    assert begun.done == 0
    assert fault_in(begun.text(0, 30)) is None


def test_an_answer_may_repeat_the_last_token_or_its_part() -> None:
    tokens = [ANSWER.text(number, number + 1) for number in range(6)]
    for begun, repeated in ((tokens[0] + tokens[1], 1), (tokens[0] + tokens[1][:3], 1), (tokens[0], 0)):
        rest = Numbered(tokens_of(PROMPT + begun), "base", 0, "repeat")
        assert rest.text(0, 3) == "".join(tokens[repeated : repeated + 3])
        assert fault_in(begun + rest.text(0, 3)) is not None
