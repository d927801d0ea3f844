"""The body reader finds what scheduling needs, in small and large bodies alike."""

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.domain import RequestFacts
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request import body_reader as body_reader_module
from llmproxy.gateway.request import parsed_body as parsed_body_module
from llmproxy.gateway.request.body_reader import (
    OPTION_BYTES_MAX,
    PARSE_VALUES_MAX,
    SEQUENCES_MAX,
    SESSION_CHARS_MAX,
    BodyReader,
    read_large,
    read_small,
)
from llmproxy.gateway.request.json_scan import MEDIA_BYTES, MEMBERS_MAX, PARSE_BYTES_MAX, BadBody, drain
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, SALT, prompt_chain

CHAT, COMPLETION, OTHER = BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.OTHER


def facts(parsed: ParsedBody) -> RequestFacts:
    return RequestFacts(*(getattr(parsed, name) for name in RequestFacts.__struct_fields__))


def facts_of(fields: dict[str, Any], kind: BodyKind = CHAT) -> RequestFacts:
    return facts(read_small(orjson.dumps(fields), kind))


def both(body: bytes, kind: BodyKind = CHAT) -> tuple[ParsedBody, ParsedBody]:
    return read_small(body, kind), drain(read_large(body, kind))


# --- facts ------------------------------------------------------------------------------------------------------------


PICTURE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]}]}
PREPARED = [
    ({"messages": [{"role": "user", "content": "hi"}]}, False),
    ({"tool_choice": "auto"}, False),
    ({"tool_choice": "none"}, False),
    ({"tool_choice": None}, False),
    ({"tool_choice": "required"}, True),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ({"response_format": {"type": "json_object"}}, True),
    ({"structured_outputs": {"choice": ["a"]}}, True),
    ({"guided_regex": "a+"}, True),
    (PICTURE, True),
]


@pytest.mark.parametrize(("fields", "prepared"), PREPARED)
def test_media_and_grammars_take_an_engine_time_before_it_begins(fields: dict[str, Any], prepared: bool) -> None:
    assert [one.prepared for one in both(orjson.dumps({"model": "m"} | fields))] == [prepared, prepared]


def test_body_is_very_large_one_byte_beyond_the_parsed_size() -> None:
    around = len(orjson.dumps({"model": "m", "prompt": ""}))
    for size_bytes, prepared in ((PARSE_BYTES_MAX, False), (PARSE_BYTES_MAX + 1, True)):
        assert facts_of({"model": "m", "prompt": "x" * (size_bytes - around)}, COMPLETION).prepared is prepared


def test_a_chat_body() -> None:
    messages = [{"role": "user", "content": "hé"}]
    facts = facts_of({"model": "m", "stream": True, "max_tokens": 7, "n": 2, "messages": messages})
    assert facts == RequestFacts("m", stream=True, prompt_bytes=3, max_tokens=7, sequences=2)


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}])
def test_no_model_is_none(fields: dict[str, Any]) -> None:
    assert facts_of(fields).model is None
    assert drain(read_large(orjson.dumps(fields), CHAT)).model is None


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": -5}, None),
        ({"max_tokens": 5.0}, None),
        ({"max_tokens": 4, "max_completion_tokens": None}, 4),
    ],
)
def test_max_tokens(fields: dict[str, Any], tokens: int | None) -> None:
    assert facts_of(fields).max_tokens == tokens


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [(CHAT, 1), (BodyKind.OTHER, 1), (BodyKind.COMPLETION, 2), (BodyKind.MESSAGES, 2), (BodyKind.RESPONSES, 3)],
)
def test_max_tokens_has_the_name_that_the_engine_reads(kind: BodyKind, tokens: int) -> None:
    fields = {"max_completion_tokens": 1, "max_tokens": 2, "max_output_tokens": 3}
    for parsed in both(orjson.dumps(fields), kind):
        assert parsed.max_tokens == tokens
    assert read_small(b'{"max_tokens":1,"max_completion_tokens":"4000"}', CHAT).max_tokens is None


@pytest.mark.parametrize(
    ("said", "sequences"),
    [("8", 8), (" 8", 8), (8.0, 8), ("8.0", 8), (8.5, 1), ("x", 1), ("inf", 1), (10**18, 1 << 20)],
)
def test_sequence_counts_are_read_as_the_engine_reads_them(said: Any, sequences: int) -> None:
    for parsed in both(orjson.dumps({"prompt": "x", "n": said}), COMPLETION):
        assert parsed.sequences_asked == sequences
        assert parsed.sequences == min(SEQUENCES_MAX, sequences)


def test_a_long_list_of_prompts_is_counted_in_full() -> None:
    for parsed in both(orjson.dumps({"prompt": [[1]] * 5000, "n": 2}), COMPLETION):
        assert (parsed.sequences_asked, parsed.sequences) == (10_000, SEQUENCES_MAX)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "abc"}, RequestFacts(None, prompt_bytes=3)),
        ({"prompt": ["abc", "de"], "n": 3}, RequestFacts(None, prompt_bytes=5, sequences=6)),
        ({"prompt": ["a"], "n": 2, "best_of": 4}, RequestFacts(None, prompt_bytes=1, sequences=4)),
        ({"prompt": [1, 2, 3]}, RequestFacts(None, prompt_tokens=3)),
        ({"prompt": [[1, 2], [3]]}, RequestFacts(None, prompt_tokens=3, sequences=2)),
        ({"input": ["a", "bc"]}, RequestFacts(None, prompt_bytes=3, sequences=2)),
        ({"input": [[1], [2], [3]]}, RequestFacts(None, prompt_tokens=3, sequences=3)),
        ({"query": "ab", "documents": ["c", "d", "e"]}, RequestFacts(None, prompt_bytes=5, sequences=3)),
        ({"text_1": "ab", "text_2": ["c", "d"]}, RequestFacts(None, prompt_bytes=4, sequences=2)),
    ],
)
def test_prompts_and_sequences(fields: dict[str, Any], expected: RequestFacts) -> None:
    small, large = both(orjson.dumps(fields), COMPLETION)
    assert facts(small) == facts(large) == expected


def test_a_batch_of_chats() -> None:
    batch = {"messages": [[{"content": "a"}], [{"content": "bc"}]]}
    assert facts_of(batch) == RequestFacts(None, prompt_bytes=3, sequences=2)


@pytest.mark.parametrize(
    ("fields", "size_bytes"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}, 3),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "http://host/a.png"}}]}]}, MEDIA_BYTES),
        ({"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": "QUJD"}}]}]}, MEDIA_BYTES),
        ({"messages": [{"content": [{"source": {"type": "base64", "data": "QUJD" * 5000}}]}]}, MEDIA_BYTES),
        ({"input": "data:image/png;base64," + "A" * 9000}, MEDIA_BYTES),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"arguments": "{}"}}]}]}, 2),
        ({"system": [{"type": "text", "text": "abc"}], "messages": []}, 3),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "abc"}]}], "instructions": "d"}, 4),
        ({"tools": [{"name": "f"}]}, 5),
        ({"metadata": {"note": "not for the engine"}, "stop": ["x"]}, 0),
        ({"prompt": "漢"}, 3),
    ],
)
def test_prompt_bytes(fields: dict[str, Any], size_bytes: int) -> None:
    assert facts_of(fields).prompt_bytes == size_bytes


def test_deep_nesting_is_no_trouble() -> None:
    deep = b"[" * 900 + b'"abc"' + b"]" * 900
    small, large = both(b'{"messages":[' + deep + b'],"tools":' + deep + b"}")
    assert small.prompt_bytes == large.prompt_bytes == 6


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        (b"", "body", "empty"),
        (b" \n", "body", "empty"),
        (b"[1]", "body", "JSON object"),
        (b'{"model":\n @}', "body.11", "line 2 column 2"),
        (b'{"model":5}', "body.model", "model must be a string"),
        (b'{"stream":"maybe"}', "body.stream", "stream must be true or false"),
        (b'{"stream":2}', "body.stream", "stream must be true or false"),
        (b"\xff", "body.0", "not valid JSON"),
    ],
)
def test_bad_bodies(body: bytes, param: str, part: str) -> None:
    with pytest.raises(BadBody, match=part) as bad:
        read_small(body, CHAT)
    assert (bad.value.param, bad.value.status) == (param, 400)
    with pytest.raises(BadBody):
        drain(read_large(body, CHAT))


def test_errors_do_not_repeat_the_prompt() -> None:
    with pytest.raises(BadBody) as bad:
        read_small(b'{"prompt":"my secret" "x"}', CHAT)
    assert "secret" not in bad.value.message


def test_stream_may_be_anything_on_endpoints_without_streams() -> None:
    assert facts_of({"stream": "maybe"}, OTHER).stream is False


@pytest.mark.parametrize("value", [b"NaN", b"01", b'"' + b"x" * 70_000 + b'"'])
def test_a_broken_or_huge_option_in_a_large_body_is_refused(value: bytes) -> None:
    with pytest.raises(BadBody):
        drain(read_large(b'{"model":' + value + b"}", CHAT))


PROMPTS = st.lists(
    st.text(
        alphabet=st.characters(min_codepoint=32, exclude_categories=["Cs"]) | st.sampled_from('\n\t"\\'), max_size=50
    ),
    min_size=1,
)


@given(PROMPTS)
def test_large_and_small_bodies_are_read_alike(prompts: list[str]) -> None:
    fields = {"model": "m", "prompt": prompts, "stream": True, "n": 2, "max_tokens": 9}
    small, large = both(json.dumps(fields, ensure_ascii=False).encode(), COMPLETION)
    assert facts(small) == facts(large)


def test_bodies_are_parsed_or_scanned_by_size() -> None:
    async def read() -> list[ParsedBody]:
        body_reader = BodyReader()
        bodies = [orjson.dumps({"model": str(n), "prompt": "word " * n}) for n in (1, PARSE_BYTES_MAX, PARSE_BYTES_MAX)]
        return await asyncio.gather(*(body_reader.read(body, COMPLETION) for body in bodies))

    parsed = asyncio.run(read())
    assert [parsed.members is None for parsed in parsed] == [True, False, False]
    assert [parsed.prompt_bytes for parsed in parsed] == [5, 5 * PARSE_BYTES_MAX, 5 * PARSE_BYTES_MAX]


@pytest.mark.parametrize("value", [b"[]", b"{}", b'""', b"1", b"[[]]"])
@pytest.mark.parametrize("values", [PARSE_VALUES_MAX - 8, PARSE_VALUES_MAX + 8])
async def test_a_small_body_of_too_many_values_is_scanned(
    value: bytes, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"messages":["",' + b",".join([value] * (values // (1 + value.count(b"[") + value.count(b"{"))))
    body += b"]}".rjust(PARSE_BYTES_MAX - len(body))
    if values > PARSE_VALUES_MAX:
        monkeypatch.delattr(body_reader_module, "read_small")
    parsed = await BodyReader().read(body, CHAT)
    assert (parsed.members is None) == (values < PARSE_VALUES_MAX)


NAMES = 500
MANY = b",".join(b'"k%d":0' % n for n in range(NAMES))


@pytest.mark.parametrize(
    "members",
    [
        MANY + b',"priority":1',
        b'"a":0,' * NAMES + b'"priority":1',
        b'"vllm_xargs":{' + MANY + b"}",
        b'"vllm_xargs":{' + MANY + b'},"vllm_xargs":null',
        b'"sampling_params":{"extra_args":{' + MANY + b'},"max_tokens":5}',
        b'"deep":' + b"[" * 1000 + b"]" * 1000 + b"," + MANY,
    ],
)
@pytest.mark.parametrize("kind", [CHAT, OTHER])
async def test_a_body_of_many_names_is_scanned_once_and_in_turns(
    members: bytes, kind: BodyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"model":"a","max_tokens":9,"stream":true,' + members + b"}"
    expected = [read_small(body, kind).answer_limits(), read_small(body, kind).spliced(priority=3, salt="x")]
    monkeypatch.setattr(body_reader_module, "TURN_S", 0.0)
    read = asyncio.create_task(BodyReader().read(body, kind))
    turns = 0
    while not read.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > NAMES
    # From here on, any scan without a turn fails.
    monkeypatch.delattr(parsed_body_module, "drain")
    parsed = read.result()
    assert [parsed.answer_limits(), parsed.spliced(priority=3, salt="x")] == expected
    assert parsed.text(SALT) is None
    assert parsed.spliced(model="b", want_usage=True, prompt_alone=True).parts


async def test_a_long_body_of_few_names_is_parsed() -> None:
    names = ("model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")
    messages = [{"role": "user", "content": f"{n}: a question, and more"} for n in range(400)]
    body = json.dumps({"messages": messages, "tools": [{"name": "look"}] * 99, **dict.fromkeys(names)}, indent=1)
    assert (await BodyReader().read(body.encode(), CHAT)).members is None


async def test_too_many_members_are_refused_by_the_reader() -> None:
    body = b'{"messages":[],"a":0' + b',"a":0' * MEMBERS_MAX + b"}"
    with pytest.raises(BadBody, match=f"more than {MEMBERS_MAX} members"):
        await BodyReader().read(body, CHAT)


@pytest.mark.parametrize("end", [b"", b"]", b',"b":}', b',"b":"\\ud800"}'])
async def test_a_broken_body_of_many_names_is_reported_by_the_parser(end: bytes) -> None:
    body = b'{"messages":[],"a":' + b"1" * 9 + b"," + MANY + end
    with pytest.raises(BadBody, match=r"is not valid JSON: .* \(line 1 column \d+\)"):
        await BodyReader().read(body, CHAT)


def test_the_loop_runs_while_large_bodies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader_module, "TURN_S", 0.0)

    async def turns() -> int:
        body_reader = BodyReader()
        body = b'{"messages":[' + b"[]," * 100_000 + b"[]]}"
        reads = [asyncio.create_task(body_reader.read(body, CHAT)) for _ in range(2)]
        turns = 0
        while not all(read.done() for read in reads):
            await asyncio.sleep(0)
            turns += 1
        assert all(read.result().sequences == SEQUENCES_MAX for read in reads)
        return turns

    # At 64 KiB a slice, two bodies of 300 kB need ten turns and those for finding their ends.
    assert asyncio.run(turns()) > 10


async def test_a_cancelled_read_releases_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader_module, "TURN_S", 0.0)
    body_reader = BodyReader()
    body = b'{"messages":[' + b"[]," * 100_000 + b"[]]}"
    read = asyncio.create_task(body_reader.read(body, CHAT))
    await asyncio.sleep(0)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert (await body_reader.read(body, CHAT)).sequences == SEQUENCES_MAX


# --- the chain of the prompt ------------------------------------------------------------------------------------------


def talk(text_bytes: int, **more: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * (text_bytes // 5)}], **more})


@pytest.mark.parametrize("text_bytes", [4000, PARSE_BYTES_MAX])
async def test_the_chain_is_computed_with_prefixes(text_bytes: int) -> None:
    body_reader = BodyReader(prefixes=True)
    body = talk(text_bytes)
    parsed = await body_reader.read(body, CHAT)
    assert parsed.chain == prompt_chain(orjson.loads(body), CHAT)
    assert len(parsed.chain.hashes) == text_bytes // BLOCK_BYTES
    salted = [(await body_reader.read(talk(text_bytes, cache_salt=salt), CHAT)).chain for salt in ("mine", "yours")]
    chains = [parsed.chain, *(chain for chain in salted if chain is not None)]
    assert len({block for chain in chains for block in chain.hashes}) == 3 * len(parsed.chain.hashes)


async def test_small_and_large_bodies_have_one_chain() -> None:
    body = talk(4000, tools=[{"name": "look"}], cache_salt="mine")
    assert (await BodyReader(prefixes=True).read(body, CHAT)).chain == drain(
        read_large(body, CHAT, prefixes=True)
    ).chain


@pytest.mark.parametrize(("turn_s", "turns"), [(0.0, 1), (60.0, 0)])
async def test_the_loop_runs_before_the_chain_of_a_dense_body(
    turn_s: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_reader_module, "TURN_S", turn_s)
    others: list[int] = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    await BodyReader(prefixes=True).read(talk(4000), CHAT)
    assert len(others) == turns


@pytest.mark.parametrize("text_bytes", [4000, PARSE_BYTES_MAX])
async def test_no_chain_is_computed_without_prefixes(text_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(body_reader_module, "prompt_chain")
    monkeypatch.delattr(body_reader_module, "large_prompt_chain")
    assert (await BodyReader().read(talk(text_bytes), CHAT)).chain is None


async def test_endpoints_without_a_prompt_have_no_blocks() -> None:
    body_reader = BodyReader(prefixes=True)
    for text_bytes in (4000, PARSE_BYTES_MAX):
        other = (await body_reader.read(talk(text_bytes), OTHER)).chain
        assert other is not None
        assert other.hashes == ()
    assert (await body_reader.read(FORM % (b"whisper", b"1"), BodyKind.FORM, FORM_TYPE)).chain is None


async def test_the_loop_runs_while_chains_of_large_bodies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader_module, "TURN_S", 0.0)
    body = talk(1_000_000)

    async def turns(body_reader: BodyReader) -> int:
        read = asyncio.create_task(body_reader.read(body, CHAT))
        turns = 0
        while not read.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    # At 64 KiB a slice, a megabyte has fifteen of them; the scan before takes as many.
    assert await turns(BodyReader(prefixes=True)) >= await turns(BodyReader()) + 15


# --- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "session"),
    [
        (b'"alice"', "alice"),
        (b'"\\u00e9\\n"', "\u00e9\n"),
        (b'""', None),
        (b"7", None),
        (b"null", None),
        (b'["alice"]', None),
        (b'"' + b"x" * SESSION_CHARS_MAX + b'"', "x" * SESSION_CHARS_MAX),
        (b'"' + b"x" * (SESSION_CHARS_MAX + 1) + b'"', None),
        (b'"' + b"\\ud83d\\ude00" * SESSION_CHARS_MAX + b'"', "\U0001f600" * SESSION_CHARS_MAX),
        (b'"' + b"x" * OPTION_BYTES_MAX + b'"', None),
    ],
)
async def test_small_and_large_bodies_name_the_same_session(value: bytes, session: str | None) -> None:
    body = b'{"messages":[],"user":' + value + b"}"
    expected = {} if session is None else {"user": session}
    assert (await BodyReader(session_members=["user"]).read(body, CHAT)).sessions == expected
    assert (await BodyReader(session_members=["user"], prefixes=True).read(body, CHAT)).sessions == expected
    assert drain(read_large(body, CHAT, session_members=["user"])).sessions == expected


async def test_a_session_is_read_only_from_configured_members() -> None:
    for body in (b'{"user":"alice","model":"m"}', talk(PARSE_BYTES_MAX, user="alice")):
        assert (await BodyReader().read(body, CHAT)).sessions == {}
        several = BodyReader(session_members=["safety_identifier", "model", "user"])
        assert (await several.read(body, CHAT)).sessions == {"model": "m", "user": "alice"}


def test_a_broken_session_name_is_left_to_the_engine() -> None:
    assert drain(read_large(b'{"user":"\\x"}', CHAT, session_members=["user"])).sessions == {}


async def test_a_form_names_its_session_in_a_field() -> None:
    form = FORM % (b"whisper", b"1")
    reader = BodyReader(session_members=["user", "model"])
    parsed = await reader.read(form, BodyKind.FORM, FORM_TYPE)
    assert parsed.sessions == {"model": "whisper"}


# --- forms ------------------------------------------------------------------------------------------------------------

FORM_TYPE = "multipart/form-data; boundary=b"
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n'
    b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\n%s\r\n--b--\r\n'
)


async def test_a_form() -> None:
    parsed = await BodyReader().read(FORM % (b"whisper", b"True"), BodyKind.FORM, FORM_TYPE)
    assert facts(parsed) == RequestFacts("whisper", stream=True, prompt_bytes=MEDIA_BYTES, prepared=True)
    spliced = parsed.spliced(model="whisper-large", want_usage=True)
    assert b"".join(spliced.parts) == FORM % (b"whisper-large", b"True")
    assert not spliced.hides_usage


@pytest.mark.parametrize(("model", "stream"), [(b"m", b"maybe"), (b"\xff", b"true")])
async def test_bad_form_fields(model: bytes, stream: bytes) -> None:
    with pytest.raises(BadBody, match="form field"):
        await BodyReader().read(FORM % (model, stream), BodyKind.FORM, FORM_TYPE)


@pytest.mark.parametrize(
    ("text", "streams"),
    [(b"1", True), (b"0", False), (b'"true"', True), (b'"off"', False), (b"null", False), (b"true", True)],
)
def test_stream_is_read_as_generously_as_the_engine_reads_it(text: bytes, streams: bool) -> None:
    assert read_small(b'{"stream":' + text + b"}", BodyKind.CHAT).stream is streams
