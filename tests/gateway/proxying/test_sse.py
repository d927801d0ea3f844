"""Recorded streams, cut anywhere, are relayed unchanged, read for tokens, usage and errors, and can hide the usage."""

from collections.abc import Callable, Iterator
from random import Random

import pytest

from llmproxy.core.domain import Usage
from llmproxy.gateway.proxying import sse
from llmproxy.gateway.proxying.sse import StreamTap, usage_in_tail

HEAD = b'data: {"id":"chatcmpl-988e","object":"chat.completion.chunk","created":1795225636,"model":"tiny",'
ROLE = (
    HEAD + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":null,"prompt_text":null}\n\n'
)
TOKEN = (
    HEAD + b'"choices":[{"index":0,"delta":{"content":" \\"usage\\":{\\n\\"choices\\":[] \xc3\xa9"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
)
LAST = HEAD + b'"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"length","stop_reason":null}]}\n\n'
USAGE = (
    HEAD + b'"choices":[],"usage":{"prompt_tokens":273,"total_tokens":276,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":256,"created_cache_tokens":0}},'
    b'"system_fingerprint":"vllm-0.32.0-0e502e2d"}\n\n'
)
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
ERROR = (
    b'data: {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": null, '
    b'"code": 500}}\n\n'
)
CHAT = [COMMENT, ROLE, TOKEN, COMMENT, TOKEN, LAST, USAGE, DONE]
COMPLETION = [
    b'data: {"id":"cmpl-b863","object":"text_completion","created":1795225664,"model":"tiny","choices":[{"index":0,'
    b'"text":"mmar","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null}]}\n\n',
    b'data: {"id":"cmpl-b863","object":"text_completion","created":1795225664,"model":"tiny","choices":[],'
    b'"usage":{"prompt_tokens":4,"total_tokens":16,"completion_tokens":12},"system_fingerprint":"vllm-0.32.0"}\n\n',
    DONE,
]
CONTINUOUS = HEAD + (
    b'"choices":[{"index":0,"delta":{"content":"ric"},"finish_reason":null}],'
    b'"usage":{"prompt_tokens":32,"total_tokens":34,"completion_tokens":2,"completion_tokens_details":null}}\n\n'
)
RESPONSES = [
    b'event: response.created\ndata: {"response":{"id":"resp_98","status":"in_progress","usage":null,"user":null},'
    b'"sequence_number":0,"type":"response.created"}\n\n',
    b'event: response.output_text.delta\ndata: {"delta":" ste","type":"response.output_text.delta"}\n\n',
    b'event: response.completed\ndata: {"response":{"id":"resp_98","metadata":{"usage":"mine"},"tools":[{"usage":{"a":'
    b'1}}],"usage":{"input_tokens":17,"input_tokens_details":{"cached_tokens":16,"input_tokens_per_turn":[]},'
    b'"output_tokens":8,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"user":null},'
    b'"sequence_number":9,"type":"response.completed"}\n\n',
]
MESSAGES = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-ab","content":[],"model":"tiny",'
    b'"stop_reason":null,"usage":{"input_tokens":17,"output_tokens":0}}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"ded"}}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"max_tokens"},'
    b'"usage":{"output_tokens":8}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]


def facts(tap: StreamTap) -> tuple[object, ...]:
    return (
        tap.first_event_complete, tap.first_token_seen, tap.error_first, tap.error_seen, tap.error,
        tap.done_seen, tap.data_events, tap.at_boundary, tap.usage,
    )  # fmt: skip


def through(chunks: list[bytes], hide_usage: bool) -> tuple[bytes, StreamTap]:
    tap = StreamTap(hide_usage)
    return b"".join(tap.feed(chunk) for chunk in chunks) + tap.flush(), tap


def cut_everywhere(stream: bytes) -> Iterator[list[bytes]]:
    for at in range(len(stream) + 1):
        yield [stream[:at], stream[at:]]
    for size in (1, 2, 3, 7, 50, len(stream)):
        yield [stream[at : at + size] for at in range(0, len(stream), size)]


@pytest.mark.parametrize("events", [CHAT, COMPLETION, RESPONSES, MESSAGES, [ERROR, DONE], [ROLE, CONTINUOUS, DONE]])
@pytest.mark.parametrize("hide_usage", [False, True])
def test_cuts_change_neither_bytes_nor_facts(events: list[bytes], hide_usage: bool) -> None:
    hidden = (USAGE, COMPLETION[1]) if hide_usage else ()
    _, whole = through(events, hide_usage)
    for chunks in cut_everywhere(b"".join(events)):
        out, tap = through(chunks, hide_usage)
        assert out == b"".join(event for event in events if event not in hidden)
        assert facts(tap) == facts(whole)


def in_two_lines(event: bytes) -> bytes:
    return event.replace(b'"choices":[', b'"choices":[\ndata: ', 1)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda event: event.replace(b"\n", b"\r\n"),
    "CR": lambda event: event.replace(b"\n", b"\r"),
    "CR, then CRLF": lambda event: event[:-2] + b"\r\r\n",
    "LF, then CRLF": lambda event: event[:-1] + b"\r\n",
    "id first": lambda event: b"id: 7\n" + event,
    "name first": lambda event: b"event: message\nretry: 10\n" + event,
    "id behind": lambda event: event[:-1] + b"id:7\n\n",
    "comment first": lambda event: b": still here\n" + event,
    "blank lines first": lambda event: b"\n\n" + event,
    "no space": lambda event: event.replace(b"data: ", b"data:"),
    "data in two lines": in_two_lines,
    "data in two lines, CR": lambda event: in_two_lines(event).replace(b"\n", b"\r"),
    "choices are null": lambda event: event.replace(b'"choices":[],', b'"choices":null,'),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_the_usage_event_is_hidden_in_every_form(form: str) -> None:
    events = [FORMS[form](event) for event in CHAT if event != COMMENT]
    usage = FORMS[form](USAGE)
    # Blank lines before an event belong to the one before it.
    rest = b"".join(event if event != usage else usage[: len(usage) - len(usage.lstrip())] for event in events)
    for chunks in cut_everywhere(b"".join(events)):
        out, tap = through(chunks, True)
        assert out == rest
        assert (tap.data_events, tap.usage, tap.done_seen) == (5, Usage(273, 3, 256), True)
        assert through(chunks, False)[0] == b"".join(events)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_usage_event_is_hidden_where_it_is_the_only_one(mark: bytes) -> None:
    for end in (b"", b"\n", b"\n\n"):
        for chunks in cut_everywhere(mark + USAGE.rstrip() + end):
            out, tap = through(chunks, True)
            assert (out, tap.usage) == (b"", Usage(273, 3, 256))


def test_an_event_that_ends_with_a_carriage_return_is_sent_at_once() -> None:
    tap = StreamTap(hide_usage=True)
    for event in (ROLE, TOKEN, COMMENT, DONE):
        assert tap.feed(FORMS["CR"](event)) == FORMS["CR"](event)


def test_facts_of_a_chat_stream_as_it_goes() -> None:
    tap = StreamTap()
    tap.feed(COMMENT)
    assert (tap.first_event_complete, tap.first_token_seen, tap.data_events) == (True, False, 0)
    tap.feed(ROLE)
    assert (tap.first_token_seen, tap.data_events, tap.usage) == (True, 1, None)
    tap.feed(TOKEN + LAST)
    assert (tap.data_events, tap.done_seen) == (3, False)
    tap.feed(USAGE + DONE)
    assert (tap.usage, tap.done_seen, tap.error_seen, tap.data_events) == (Usage(273, 3, 256), True, False, 4)


@pytest.mark.parametrize(
    ("events", "usage"),
    [
        (COMPLETION, Usage(4, 12)),
        (RESPONSES, Usage(17, 8, 16)),
        (MESSAGES, Usage(17, 8)),
        ([ROLE, CONTINUOUS], Usage(32, 2)),
        ([ROLE, TOKEN, DONE], None),
    ],
)
def test_usage_in_every_dialect(events: list[bytes], usage: Usage | None) -> None:
    assert through(events, False)[1].usage == usage


@pytest.mark.parametrize("events", [COMPLETION, RESPONSES, MESSAGES])
def test_the_end_in_every_dialect(events: list[bytes]) -> None:
    tap = StreamTap()
    for event in events[:-1]:
        tap.feed(event)
        assert not tap.done_seen
    tap.feed(events[-1])
    assert tap.done_seen


def test_an_acknowledgement_is_no_token() -> None:
    tap = StreamTap()
    tap.feed(RESPONSES[0])
    assert (tap.first_token_seen, tap.data_events) == (False, 1)
    tap.feed(RESPONSES[1])
    assert tap.first_token_seen


@pytest.mark.parametrize(
    "error",
    [
        ERROR,
        b'event: error\ndata: {"error":{"message":"x"}}\n\n',
        b'event: error\ndata: {"type":"error","error":{"message":"x"}}\n\n',
        b'data:{"error":"x"}\n\n',
        b'event: response.failed\ndata: {"response":{}}\n\n',
    ],
)
def test_errors_first_and_later(error: bytes) -> None:
    first, later = StreamTap(), StreamTap()
    first.feed(COMMENT + error)
    assert (first.error_first, first.error_seen, first.first_token_seen) == (True, True, False)
    later.feed(ROLE)
    later.feed(error + DONE)
    assert (later.error_first, later.error_seen, later.first_token_seen) == (False, True, True)


def test_an_event_sent_line_by_line_is_one() -> None:
    _, tap = through([ROLE, b"event: error\n", b'data: {"id":"x"}\n\n'], False)
    assert (tap.error_seen, tap.at_boundary, tap.data_events) == (True, True, 2)


def test_at_boundary_is_about_sent_bytes() -> None:
    for hide_usage in (False, True):
        tap = StreamTap(hide_usage)
        tap.feed(ROLE + TOKEN[:200])
        assert not tap.at_boundary
        tap.feed(TOKEN[200:])
        assert tap.at_boundary
    assert tap.feed(USAGE[:100]) == b""
    assert tap.at_boundary
    assert tap.flush() == USAGE[:100]
    assert not tap.at_boundary


def test_an_event_is_held_only_while_it_may_be_the_usage_event() -> None:
    tap = StreamTap(hide_usage=True)
    choice = TOKEN.index(b'"choices":[{') + len(b'"choices":[{')
    assert tap.feed(TOKEN[: choice - 1]) == b""
    assert tap.feed(TOKEN[choice - 1 : choice]) == TOKEN[:choice]
    assert tap.feed(TOKEN[choice:]) == TOKEN[choice:]
    # A comment may be a line of that event.
    assert tap.feed(COMMENT[:4]) == b""
    assert tap.feed(COMMENT[4:]) == COMMENT


def test_an_event_too_deep_for_a_parser_is_passed_on() -> None:
    deep = b'data: {"choices":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"usage":{"prompt_tokens":5}}\n\n'
    out, tap = through([deep], hide_usage=True)
    assert (out, tap.usage) == (deep, Usage(5, 0))


def test_an_endless_event_is_let_go_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BUFFERED_BYTES_MAX", 1000)
    monkeypatch.setattr(sse, "USAGE_TAIL_BYTES", 500)
    long = (
        b'event: response.completed\ndata: {"text":"'
        + b"x" * 5000
        + b'","usage":{"input_tokens":1,"output_tokens":2}}\n\n'
    )
    held = b'data: {"text":"' + b"x" * 5000
    for size in (1, 300, 10_000):
        for stream in (long, held):
            tap = StreamTap(hide_usage=True)
            out = b""
            for at in range(0, len(stream), size):
                out += tap.feed(stream[at : at + size])
                assert len(tap._partial) <= 1000
            assert out == stream
        out, tap = through([long[at : at + size] for at in range(0, len(long), size)], False)
        assert (out, tap.usage, tap.done_seen) == (long, Usage(1, 2), True)


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"id":"x","choices":[{}],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}}', Usage(5, 2)),
        (b'ed"}],"usage": {"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null},"x":1}', Usage(5, 2)),
        (b'{"usage":{"prompt_tokens":6,"total_tokens":6,"completion_tokens":0}}', Usage(6, 0)),
        (b'{"usage":{"prompt_tokens":6,"total_tokens":6}}', Usage(6, 0)),
        # As vLLM reports a prompt of 294 tokens: nothing of it cached, and most of it.
        (
            b'{"content":[],"usage":{"input_tokens":6,"output_tokens":4,"cache_creation_input_tokens":288,'
            b'"cache_read_input_tokens":0}}',
            Usage(294, 4, 0),
        ),
        (
            b'{"content":[],"usage":{"input_tokens":6,"output_tokens":4,"cache_creation_input_tokens":0,'
            b'"cache_read_input_tokens":288}}',
            Usage(294, 4, 288),
        ),
        (b'{"content":[],"usage":{"input_tokens":294,"output_tokens":0}}', Usage(294, 0)),
        (
            b'{"usage":{"input_tokens":294,"input_tokens_details":{"cached_tokens":288},"output_tokens":4}}',
            Usage(294, 4, 288),
        ),
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":2},"echo":{"usage":{"a":1}}}', Usage(5, 2)),
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":2},"echo":{"usage":{"prompt_tokens":1}}}', Usage(5, 2)),
        (b'{"echo":[{"usage":{"prompt_tokens":1}}],"usage":null}', None),
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":2},"ids":[' + b"[1,2]," * 500 + b"[]]}", Usage(5, 2)),
        (b'{"response":{"x":{"usage":{"input_tokens":1}}},"type":"response.completed"}', None),
        (b'{"tools":{"usage":{"input_tokens":1}},"type":"response.completed"}', None),
        (b'{"usage":{"prompt_tokens":1,"completion_tokens":' + b"9" * 400 + b"}}", None),
        (b'{"usage":{"prompt_tokens":1},"a":"\\\\","b":"\\"}{"}', Usage(1, 0)),
        (b'{"usage":null}', None),
        (b'{"usage":{"prompt_tokens":5', None),
        (b'{"usage":{"prompt_tokens":"5"}}', None),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":5}"}', None),
        (b"", None),
        (b"}" + b"[" * 9, None),
        (b'"usage":{"prompt_tokens":5}}' + b"{" * 9, None),
        (b'"usage":{' * 20_000, None),
        (b'"usage":' + b"[" * 100_000, None),
        (b'"usage":{"a":' * 2000, None),
    ],
)
def test_usage_of_a_tail(tail: bytes, usage: Usage | None) -> None:
    assert usage_in_tail(tail) == usage


def test_an_answer_that_is_no_json_has_no_usage() -> None:
    sounds = [Random(seed).randbytes(sse.USAGE_TAIL_BYTES) for seed in range(20)]
    assert [usage_in_tail(sound) for sound in sounds] == [None] * 20


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"id":"a","error":{"message":"boom","code":500}}\n\n',
        b'data: {"id":"a","object":"error","message":"boom"}\n\n',
        b'data: {"id":"a","choices":[{"delta":{},"finish_reason":"error"}],"error":{"code":502}}\n\n',
    ],
)
@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b""])
def test_an_error_that_begins_like_a_token_is_known_after_tokens(event: bytes, end: bytes) -> None:
    tap = StreamTap()
    token = b'data: {"id":"a","choices":[{"delta":{"content":"error"}}]}\n\n'
    assert [tap.feed(one) for one in (token, token, event, end)] == [token, token, event, end]
    tap.flush()
    assert tap.error_seen
    assert tap.error == event[6:].strip()
    calm = StreamTap()
    for one in (token, token, end):
        calm.feed(one)
    calm.flush()
    assert not calm.error_seen
