"""Answers that another replica continues: numbered text, and the forms in which vLLM 0.32 takes a begun answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica, ReplicaOptions
from llmproxy.lab.simulator.server.answer_text import EOS
from llmproxy.lab.simulator.server.text import text_of
from tests.lab.simulator.conftest import CHAT_PATH, FAST, chunks_of, post
from tests.lab.simulator.test_replica import keys
from tests.numbered import fault_in

NUMBERED = replace(FAST, text="numbered")
COMPLETION_PATH = "/v1/completions"
ASKED = {"role": "user", "content": "Count, please: é"}
LENGTH = 45
LIMIT = {"max_tokens": LENGTH, "ignore_eos": True, "return_token_ids": True}
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}
WAYS = ("chat", "responses", "text", "ids", "chat_ids")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with Replica(NUMBERED) as replica, aiohttp.ClientSession(replica.url) as session:
        yield session


async def answered(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[str, Any]:
    """The text of an answer, and the answer."""
    status, answer = await post(client, path, body)
    assert status == 200, answer
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"], answer
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"], answer


async def streamed(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without the end mark."""
    async with client.post(path, json=body | {"stream": True}) as answer:
        return [json.loads(chunk[6:]) for chunk in (await chunks_of(answer))[:-1]]


class Begun:
    """An answer of `LENGTH` tokens, with the text and the id of each, as a stream told them."""

    def __init__(self, events: list[Any]) -> None:
        choices = [event["choices"][0] for event in events]
        if "delta" in choices[0]:
            self.prompt_ids = events[0]["prompt_token_ids"]
            choices = choices[1:]
        else:
            self.prompt_ids = choices[0]["prompt_token_ids"]
        self.texts = [one["delta"]["content"] if "delta" in one else one["text"] for one in choices]
        self.ids = [token for one in choices for token in one["token_ids"]]
        self.text = "".join(self.texts)
        assert len(self.ids) == len(self.texts) == LENGTH

    def rest(self, way: str, cut: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a request for all tokens behind the first `cut`."""
        text = "".join(self.texts[:cut])
        limit = {"max_tokens": LENGTH - cut, "ignore_eos": True}
        if way == "ids":
            return COMPLETION_PATH, {"prompt": self.prompt_ids + self.ids[:cut], **limit}
        if way == "text":
            return COMPLETION_PATH, {"prompt": ASKED["content"] + text, **limit}
        if way == "chat_ids":
            ids = {"prompt_token_ids": self.prompt_ids + self.ids[:cut]}
            return CHAT_PATH, {"messages": [ASKED], "kv_transfer_params": ids, **limit}
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if way == "chat":
            return CHAT_PATH, {"messages": [ASKED, said], **CONTINUES, **limit}
        said |= {"type": "message", "status": "incomplete", "content": [{"type": "output_text", "text": text}]}
        return "/v1/responses", {"input": [ASKED, said], "max_output_tokens": LENGTH - cut, "ignore_eos": True}


async def begun(client: aiohttp.ClientSession, way: str) -> Begun:
    path = CHAT_PATH if way in ("chat", "responses", "chat_ids") else COMPLETION_PATH
    asked = {"messages": [ASKED]} if path == CHAT_PATH else {"prompt": ASKED["content"]}
    return Begun(await streamed(client, path, asked | LIMIT))


async def test_numbered_text_shows_every_lost_and_doubled_token(client: aiohttp.ClientSession) -> None:
    answer = await begun(client, "chat")
    assert fault_in(answer.text) is None
    assert set(answer.text) > set('😀ü€é"\\\n\t')
    # A token that ends within a character comes with the next token.
    assert [number for number, text in enumerate(answer.texts) if not text] == list(range(6, LENGTH, 7))
    shown = [text for text in answer.texts if text]
    for number in range(len(shown) - 1):
        assert fault_in("".join(shown[:number] + shown[number + 1 :])) is not None
        assert fault_in("".join(shown[: number + 1] + shown[number:])) is not None
    whole, _ = await answered(client, CHAT_PATH, {"messages": [ASKED], **LIMIT})
    assert whole == answer.text
    other, _ = await answered(client, CHAT_PATH, {"messages": [ASKED, ASKED], **LIMIT})
    assert fault_in(other) is None
    assert fault_in(whole[:10] + other[10:]) == f"token 2 is {other[10:16]!r}"


@pytest.mark.parametrize("way", WAYS)
async def test_words_go_on_at_another_replica_too(way: str) -> None:
    async with Replica(FAST) as first, aiohttp.ClientSession(first.url) as client:
        answer = await begun(client, way)
        for cut in range(1, LENGTH):
            rest, _ = await answered(client, *answer.rest(way, cut))
            assert "".join(answer.texts[:cut]) + rest == answer.text


@pytest.mark.parametrize("way", WAYS)
async def test_another_replica_goes_on_at_the_right_token(client: aiohttp.ClientSession, way: str) -> None:
    answer = await begun(client, way)
    async with Replica(NUMBERED) as second, aiohttp.ClientSession(second.url) as other:
        for cut in range(1, LENGTH):
            if not answer.texts[cut - 1]:
                continue
            rest, continued = await answered(other, *answer.rest(way, cut))
            assert "".join(answer.texts[:cut]) + rest == answer.text
            usage = continued["usage"]
            assert usage["total_tokens"] == len(answer.prompt_ids) + LENGTH


@pytest.mark.parametrize("way", WAYS)
async def test_text_that_was_held_back_is_written_again(client: aiohttp.ClientSession, way: str) -> None:
    """A token that ends within a character has no text yet. With its id, vLLM writes the whole prompt before it."""
    answer = await begun(client, way)
    path, body = answer.rest(way, 7)
    assert answer.texts[6] == ""
    rest, _ = await answered(client, path, body)
    if way in ("ids", "chat_ids"):
        assert rest == text_of(answer.prompt_ids) + answer.text
    else:
        # The rest is one token short, because the limit counts the token that was lost.
        assert answer.text.startswith("".join(answer.texts[:7]) + rest)
        assert answer.text.removeprefix("".join(answer.texts[:7]) + rest) == answer.texts[-1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("join", ["split", "repeat"])
async def test_a_join_differs_only_where_text_is_given(client: aiohttp.ClientSession, way: str, join: Any) -> None:
    answer = await begun(client, way)
    cut = 10
    path, body = answer.rest(way, cut)
    same, _ = await answered(client, path, body)
    async with Replica(replace(NUMBERED, join=join)) as second, aiohttp.ClientSession(second.url) as other:
        rest, continued = await answered(other, path, body)
    if way in ("ids", "chat_ids"):
        assert rest == same
        return
    # The last token of the text has become other tokens, too.
    usage = continued["usage"]
    assert usage["total_tokens"] > len(answer.prompt_ids) + LENGTH
    if join == "split":
        assert same.startswith(rest)
        assert len(rest) < len(same), "the same text is more tokens"
    else:
        assert rest.startswith(answer.texts[cut - 1] + answer.texts[cut])
        assert fault_in("".join(answer.texts[:cut]) + rest) == f"token {cut} is {answer.texts[cut - 1]!r}"


@pytest.mark.parametrize("way", WAYS)
async def test_a_continued_answer_ends_where_the_whole_one_does(client: aiohttp.ClientSession, way: str) -> None:
    answer = await begun(client, way)
    async with Replica(replace(NUMBERED, reply_tokens=(20, 20))) as ending, aiohttp.ClientSession(ending.url) as other:
        for cut in (1, 18, 19, 20, 30):
            path, body = answer.rest(way, cut)
            text, continued = await answered(other, path, body | {"ignore_eos": False})
            assert "".join(answer.texts[:cut]) + text == "".join(answer.texts[: max(cut, 19)])
            tokens = continued["usage"]["total_tokens"] - len(answer.prompt_ids) - cut
            assert tokens == max(20 - cut, 1), "the end is a token without text"
            if "choices" in continued:
                assert continued["choices"][0]["finish_reason"] == "stop"


async def test_the_last_token_of_an_answer_that_ends_has_no_text() -> None:
    async with Replica(replace(NUMBERED, reply_tokens=(3, 3))) as replica, aiohttp.ClientSession(replica.url) as client:
        body = {"prompt": "Hello", "return_token_ids": True}
        *_, last = [event["choices"][0] for event in await streamed(client, COMPLETION_PATH, body)]
    assert (last["text"], last["token_ids"], last["finish_reason"]) == ("", [EOS], "stop")


@pytest.mark.parametrize(("stop", "included"), [(["nowhere", "12~"], False), ("12~", False), ("9~", True)])
async def test_a_stop_string_ends_an_answer_whose_text_lags(
    client: aiohttp.ClientSession, stop: Any, included: bool
) -> None:
    answer = await begun(client, "text")
    body = {"prompt": ASKED["content"], **LIMIT, "stop": stop, "include_stop_str_in_output": included}
    events = [event["choices"][0] for event in await streamed(client, COMPLETION_PATH, body)]
    _, whole = await answered(client, COMPLETION_PATH, body)
    assert "".join(event["text"] for event in events) == whole["choices"][0]["text"]
    found = stop if isinstance(stop, str) else stop[-1]
    before, _, _ = answer.text.partition(found)
    assert whole["choices"][0]["text"] == before + found * included
    tokens = int(found.removesuffix("~")) + 1
    assert [event["token_ids"] for event in events] == [[token] for token in answer.ids[:tokens]]
    assert (events[-1]["finish_reason"], events[-1]["stop_reason"]) == ("stop", found)
    assert events[-2]["stop_reason"] is None
    lag = 0 if included else len(max(stop, key=len) if isinstance(stop, list) else stop) - 1
    shown = "".join(event["text"] for event in events[:6])
    assert len(shown) == len("".join(answer.texts[:6])) - lag
    # A replica that goes on from the ids does not know the text that lags.
    prompt = answer.prompt_ids + answer.ids[:6]
    rest, _ = await answered(client, COMPLETION_PATH, body | {"prompt": prompt})
    assert len(shown + rest) == len(whole["choices"][0]["text"]) - lag


async def test_a_stop_string_that_is_cut_is_found_in_text_and_missed_in_ids(client: aiohttp.ClientSession) -> None:
    answer = await begun(client, "text")
    stop = answer.texts[2][-1] + answer.texts[3][:2]
    body = {"stop": [stop], "max_tokens": 10}
    before, _, _ = answer.text.partition(stop)
    by_ids, _ = await answered(
        client, COMPLETION_PATH, body | {"prompt": answer.prompt_ids + answer.ids[:3], "ignore_eos": True}
    )
    assert by_ids == "".join(answer.texts[3:13])
    lagging = answer.text[: len("".join(answer.texts[:3])) - len(stop) + 1]
    by_text, _ = await answered(client, COMPLETION_PATH, body | {"prompt": ASKED["content"] + lagging})
    assert lagging + by_text == before


async def test_stop_strings_wait_for_the_least_tokens(client: aiohttp.ClientSession) -> None:
    body = {"prompt": ASKED["content"], "max_tokens": 20, "stop": "~", "min_tokens": 5}
    _, whole = await answered(client, COMPLETION_PATH, body)
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (6, "stop")


@pytest.mark.parametrize("text", ["words", "numbered"])
async def test_token_ids_have_the_recorded_places(text: Any) -> None:
    """As recorded in streams and answers of vLLM 0.32, for `return_token_ids`."""
    chat = {"messages": [ASKED], "max_tokens": 3, "return_token_ids": True}
    completion = {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True}
    async with Replica(replace(FAST, text=text)) as replica, aiohttp.ClientSession(replica.url) as client:
        role, *deltas = await streamed(client, CHAT_PATH, chat)
        _, whole_chat = await answered(client, CHAT_PATH, chat)
        parts = await streamed(client, COMPLETION_PATH, completion)
        _, whole = await answered(client, COMPLETION_PATH, completion)
        _, tokenized = await post(client, "/tokenize", {"messages": [ASKED]})
        _, named = await post(client, "/detokenize", {"tokens": whole["choices"][0]["token_ids"]})
        _, several = await answered(client, COMPLETION_PATH, completion | {"prompt": [[5], [6, 7]], "n": 2})
    assert role["prompt_token_ids"] == whole_chat["prompt_token_ids"] == tokenized["tokens"]
    assert "token_ids" not in role["choices"][0]
    ids = [delta["choices"][0]["token_ids"] for delta in deltas]
    assert [len(one) for one in ids] == [1, 1, 1]
    assert [token for one in ids for token in one] == whole_chat["choices"][0]["token_ids"]
    assert all("prompt_token_ids" not in delta for delta in deltas)
    assert [part["choices"][0]["prompt_token_ids"] for part in parts] == [[5, 6, 7], None, None]
    ids = [part["choices"][0]["token_ids"] for part in parts]
    choice = whole["choices"][0]
    assert [token for one in ids for token in one] == choice["token_ids"]
    assert keys(choice) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"),
        *("prompt_token_ids", "routed_experts"),
    ]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert named == {"prompt": choice["text"]}
    assert [one["prompt_token_ids"] for one in several["choices"]] == [[5], [5], [6, 7], [6, 7]]


async def test_merged_deltas_have_the_ids_of_all_their_tokens() -> None:
    async with Replica(replace(NUMBERED, ragged_deltas=True)) as replica, aiohttp.ClientSession(replica.url) as client:
        events = await streamed(client, CHAT_PATH, {"messages": [ASKED], **LIMIT})
        _, whole = await answered(client, CHAT_PATH, {"messages": [ASKED], **LIMIT})
    choices = [event["choices"][0] for event in events[1:]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["choices"][0]["message"]["content"]
    assert max(len(choice["token_ids"]) for choice in choices) > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"add_generation_prompt": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
        ({}, "continue_final_message and add_generation_prompt are not compatible."),
    ],
)
async def test_an_answer_is_not_both_continued_and_begun(
    client: aiohttp.ClientSession, fields: dict[str, bool], message: str
) -> None:
    body = {"messages": [ASKED], "continue_final_message": True, **fields}
    status, answer = await post(client, CHAT_PATH, body)
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (400, "BadRequestError", None)
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("ids", [[], "5", [5, -1], [5, True], [5, "6"]])
async def test_token_ids_of_a_conversation_are_checked(client: aiohttp.ClientSession, ids: Any) -> None:
    body = {"messages": [ASKED], "kv_transfer_params": {"prompt_token_ids": ids}}
    status, answer = await post(client, CHAT_PATH, body)
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.prompt_token_ids")


async def test_token_ids_do_not_replace_images(client: aiohttp.ClientSession) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1, "return_token_ids": True}
    _, without = await answered(client, CHAT_PATH, body)
    _, ignored = await answered(client, CHAT_PATH, body | {"kv_transfer_params": {"prompt_token_ids": [5, 6]}})
    assert ignored["prompt_token_ids"] == without["prompt_token_ids"]
    assert len(without["prompt_token_ids"]) > 2


async def test_messages_begin_a_new_answer_after_one_of_the_assistant(client: aiohttp.ClientSession) -> None:
    answer = await begun(client, "chat")
    said = {"role": "assistant", "content": "".join(answer.texts[:6])}
    status, whole = await post(client, "/v1/messages", {"messages": [ASKED, said], "max_tokens": 6})
    assert status == 200
    assert whole["content"][0]["text"].startswith(" 0~")


async def test_the_next_turn_finds_a_numbered_answer_cached(client: aiohttp.ClientSession) -> None:
    body = {"messages": [ASKED], "max_tokens": 60, "ignore_eos": True}
    text, answer = await answered(client, CHAT_PATH, body)
    said = {"role": "assistant", "content": text}
    _, again = await answered(client, CHAT_PATH, {"messages": [ASKED, said, ASKED], "max_tokens": 1})
    known = answer["usage"]["total_tokens"] - 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16 > 32


def test_a_join_without_numbered_text_is_refused() -> None:
    with pytest.raises(ValueError, match="join split needs numbered text"):
        ReplicaOptions(join="split")
