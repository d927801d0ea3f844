"""A request is charged the tokens that its engine counted where possible, and never a number from the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from llmproxy.core.estimates.tokens import OUTPUT_TOKENS
from llmproxy.core.queueing.fairness.fair_share import FairShare
from llmproxy.gateway.http.routes import SCHEDULED, Route, Work
from llmproxy.gateway.proxying.stream_relay import BUFFERED_BYTES_MAX
from llmproxy.observe.exit import RequestExit
from tests.e2e.proxies import ENDLESS, FAST, ProxyUnderTest, all_of, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, Script, breaking, chunk, serving_script, whole
from tests.upstream.raw_server import Peer

HUGE = "1" + "0" * 400
LIES = {
    "negative": '{"prompt_tokens": -5000000, "completion_tokens": -7000000}',
    "a negative part": '{"prompt_tokens": 3, "completion_tokens": -7000000}',
    "10^15": '{"prompt_tokens": 1000000000000000, "completion_tokens": 2}',
    "2^63": '{"prompt_tokens": 9223372036854775808, "completion_tokens": 9223372036854775808}',
    "10^400": f'{{"prompt_tokens": {HUGE}, "completion_tokens": {HUGE}}}',
    "10^400 cached": f'{{"prompt_tokens": 3, "prompt_tokens_details": {{"cached_tokens": {HUGE}}}}}',
    "cached more than there were": '{"prompt_tokens": 3, "completion_tokens": 2, "cache_read_input_tokens": 999999999}',
    "no numbers": '{"prompt_tokens": 1e300, "completion_tokens": NaN}',
    "too deep": '{"prompt_tokens": 3, "completion_tokens": 2, "a": ' + "[" * 5000 + "]" * 5000 + "}",
    "more than was asked for": '{"prompt_tokens": 3, "completion_tokens": 17}',
}  # fmt: skip
BODY = {"model": "base", "messages": [{"role": "user", "content": "x"}], "max_tokens": 16}
LIMITED: dict[str, Any] = {"models": [{"name": "base", "limits": {"in_flight": 2, "tokens_per_min": 1_000_000}}]}


def accounts(proxy: ProxyUnderTest) -> tuple[int, float, float, float]:
    """Returns requests in flight, tokens left of the limit, the charge of the flow, and the expected answer length."""
    pools = proxy.app.pools
    (limit,) = pools.snapshot(asyncio.get_running_loop().time()).limits
    fairness = pools.schedulers["base"]._room.bands[0].fairness
    assert isinstance(fairness, FairShare)
    assert limit.tokens_left is not None
    learned = pools.estimator.models.get("base")
    charged = dict(fairness.standing("base"))["counter"]
    return limit.in_flight, limit.tokens_left, charged, learned.output_tokens if learned else 0.0


def answering(usage: str) -> Script:
    """A script of a backend whose answers have this usage."""

    async def script(peer: Peer, request: bytes) -> None:
        if b'"stream":true' not in request.replace(b" ", b""):
            answer = f'{{"id":"c","choices":[{{"message":{{"content":"x"}}}}],"usage":{usage}}}'
            await peer.send(whole(answer.encode()))
            return
        event = 'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
        event += f'data: {{"id":"c","choices":[],"usage":{usage}}}\n\ndata: [DONE]\n\n'
        await peer.send(STREAM_HEAD + chunk(event.encode()) + STREAM_END)

    return script


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lie", LIES)
async def test_a_backend_that_lies_about_usage_shifts_no_account(lie: str, stream: bool) -> None:
    async with serving_script(answering(LIES[lie]), **LIMITED) as (proxy, _):
        for _ in range(3):
            answer = await proxy.chat(BODY | {"stream": stream})
            assert answer.status == 200
        await proxy.settled()
        in_flight, left, charged, output_tokens = accounts(proxy)
        assert in_flight == 0
        # Each was expected to be one token of prompt, and as many of output as were asked for.
        assert 1_000_000 - 3 * 20 <= left <= 1_000_000
        assert 0 < charged <= 3 * (1 + 2 * 16)
        assert output_tokens <= 16


async def test_usage_that_is_not_believed_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[RequestExit] = []
    monkeypatch.setattr("llmproxy.gateway.proxying.handler.log_exit", ended.append)
    async with serving_script(answering(LIES["10^15"]), **LIMITED) as (proxy, _):
        await proxy.chat(BODY)
        await proxy.settled()
        (request_exit,) = ended
        assert request_exit.last.prompt_tokens is None
        assert request_exit.error is not None
        assert "the backend's usage is impossible: 1000000000000000 prompt" in request_exit.error
    event = f'data: {{"choices":[{{"delta":{{"content":"x"}}}}],"usage":{LIES["10^15"]}}}\n\n'
    broken = breaking(STREAM_HEAD, chunk(event.encode()))
    async with serving_script(broken, retry={"continue": "off"}, **LIMITED) as (proxy, _):
        async with proxy.stream(BODY | {"stream": True}) as stream:
            await all_of(stream)
        await proxy.settled()
        assert "; the backend's usage is impossible" in ended[-1].last.detail


ECHOES: Mapping[str, str] = {
    "behind the answer": '"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2},"echo":{"usage":%s}',
    "before it": '"echo":{"usage":%s},"usage":{"prompt_tokens":3,"completion_tokens":2},"choices":[]',
    "in a list": '"usage":{"prompt_tokens":3,"completion_tokens":2},"tools":[{"usage":%s}]',
    "without usage": '"choices":[],"usage":null,"kv_transfer_params":{"usage":%s}',
}


@pytest.mark.parametrize("place", ECHOES)
async def test_a_usage_that_a_client_brought_is_not_read(place: str) -> None:
    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(whole(("{" + ECHOES[place] % '{"prompt_tokens":0,"completion_tokens":0}' + "}").encode()))

    async with serving_script(script, **LIMITED) as (proxy, _):
        await proxy.chat(BODY)
        await proxy.settled()
        assert accounts(proxy)[2] >= 3 + 2 * 2


@pytest.mark.parametrize("route", [route for route in SCHEDULED.values() if route.work is Work.NOTHING])
async def test_request_without_generation_costs_nothing(route: Route) -> None:
    script = answering('{"prompt_tokens": 900, "completion_tokens": 900}')
    async with serving_script(script, **LIMITED) as (proxy, backend):
        # A GET would pass for a poll there.
        backend.polls[route.path.encode()] = script
        answer = await proxy.request(route.method, route.path, BODY | {"input": "x" * 4000})
        assert answer.status == 200
        await proxy.settled()
        assert accounts(proxy) == (0, 1_000_000, 0.0, 0.0)


async def test_an_engine_that_only_reads_teaches_nothing_about_answers() -> None:
    script = answering('{"prompt_tokens": 9, "total_tokens": 9}')
    async with serving_script(script, **LIMITED) as (proxy, _):
        await proxy.post("/v1/score", {"model": "base", "text_1": "a", "text_2": ["b", "c"]})
        await proxy.settled()
        _, _, charged, output_tokens = accounts(proxy)
        assert (charged, output_tokens) == (9, 256)


GENERATED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "completion, a limit of chats beside its own": (
        "/v1/completions", {"prompt": "x", "max_tokens": 4000, "max_completion_tokens": 1},
    ),
    "message, a limit of chats beside its own": (
        "/v1/messages", {"messages": [], "max_tokens": 4000, "max_completion_tokens": 1},
    ),
    "response, a limit of chats beside its own": (
        "/v1/responses", {"input": "x", "max_output_tokens": 4000, "max_tokens": 1},
    ),
    "a number that is text": (
        "/v1/chat/completions", {"messages": [], "max_completion_tokens": "4000", "max_tokens": 1},
    ),
    "n that is text": ("/v1/completions", {"prompt": "x", "n": "8", "max_tokens": 500}),
    "limits in sampling parameters": (
        "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 400, "n": 10}, "max_tokens": 1},
    ),
    "many prompts": ("/v1/completions", {"prompt": [[1]] * 2000, "max_tokens": 2}),
    "documents in an object": ("/v1/rerank", {"query": "x", "documents": {"content": [{"type": "text"}] * 3}}),
}  # fmt: skip


@pytest.mark.parametrize("case", GENERATED)
async def test_usage_of_the_engine_is_charged_for_any_request(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[RequestExit] = []
    monkeypatch.setattr("llmproxy.gateway.proxying.handler.log_exit", ended.append)
    path, body = GENERATED[case]
    script = answering('{"prompt_tokens": 6, "input_tokens": 6, "completion_tokens": 3900, "output_tokens": 3900}')
    if path == "/v1/rerank":
        script = answering('{"prompt_tokens": 9000, "completion_tokens": 0}')
    async with serving_script(script, **LIMITED) as (proxy, _):
        answer = await proxy.post(path, {"model": "base"} | body)
        assert answer.status == 200
        await proxy.settled()
        (request_exit,) = ended
        assert request_exit.error is None
        assert request_exit.known_prompt_tokens in (6, 9000)


@pytest.mark.parametrize("options", [{"include_usage": False}, {"continuous_usage_stats": True}])
async def test_an_answer_without_usage_is_charged_as_seen(options: dict[str, bool]) -> None:
    async def script(peer: Peer, _: bytes) -> None:
        event = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
        await peer.send(STREAM_HEAD + chunk(event * 9000 + b"data: [DONE]\n\n") + STREAM_END)

    async with serving_script(script, **LIMITED) as (proxy, _):
        await proxy.chat(BODY | {"stream": True, "max_tokens": 9000, "stream_options": options})
        await proxy.settled()
        _, left, charged, _ = accounts(proxy)
        assert left < 1_000_000 - 5000
        assert charged >= 2 * 9000


@pytest.mark.parametrize(
    ("path", "body", "learned"),
    [
        ("/v1/completions", {"prompt": "x"}, 3900),
        ("/v1/completions", {"prompt": [[1]] * 3900}, 1),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 10}}, 256),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]] * 10_000}, 256),
    ],
)
async def test_the_sum_of_many_answers_is_not_learned_as_one(path: str, body: dict[str, Any], learned: float) -> None:
    script = answering('{"prompt_tokens": 6, "completion_tokens": 3900}')
    async with serving_script(script, **LIMITED) as (proxy, _):
        await proxy.post(path, {"model": "base"} | body)
        await proxy.settled()
        assert accounts(proxy)[3] == learned


BEGUN: Mapping[str, tuple[str, str, str]] = {
    "a message": (
        "/v1/messages",
        'event: message_start\ndata: {"type":"message_start",'
        '"message":{"usage":{"input_tokens":5,"output_tokens":0}}}\n\n',
        'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n',
    ),
    "one choice of many": (
        "/v1/chat/completions",
        'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
        'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}],'
        '"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEGUN)
async def test_a_client_that_leaves_early_is_charged_as_seen(case: str) -> None:
    path, first, event = BEGUN[case]

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD + chunk((first + event * 9000).encode()))
        await asyncio.sleep(60)

    body = BODY | {"stream": True, "n": 8, "max_tokens": 9000}
    async with serving_script(script, **LIMITED) as (proxy, _):
        async with proxy.stream(body, path=path) as stream:
            read = 0
            while read < len(first + event * 9000):
                read += len(await stream.content.readany())
        await proxy.settled()
        _, left, charged, _ = accounts(proxy)
        assert left < 1_000_000 - 5000
        assert charged >= 2 * 9000


@pytest.mark.parametrize(("behind", "charged"), [(400, 9 + 2 * 3400), (3000, 2 * 50_000)])
async def test_much_behind_the_usage_of_an_answer_hides_it_from_no_limit(behind: int, charged: int) -> None:
    probability = '{"123":{"logprob":-1.25,"rank":1,"decoded_token":"x"},"4":{"logprob":-9.5,"rank":2}}'

    async def script(peer: Peer, _: bytes) -> None:
        answer = (
            '{"id":"c","choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":9,"completion_tokens":3400},'
        )
        await peer.send(whole(f'{answer}"prompt_logprobs":[{",".join([probability] * behind)}]}}'.encode()))

    async with serving_script(script, **LIMITED) as (proxy, _):
        await proxy.chat({"model": "base", "messages": BODY["messages"]})
        await proxy.settled()
        assert accounts(proxy)[2] >= charged


async def test_leaving_before_the_end_of_a_plain_answer_is_not_free() -> None:
    async with serving(FAST, **LIMITED) as proxy:
        asked = proxy.waiting(ENDLESS | {"stream": False})
        await until(lambda: proxy.replicas[0].in_flight == 1)
        asked.cancel()
        await until(lambda: proxy.app.handler.open_requests == 0)
        assert accounts(proxy)[2] > 2 * OUTPUT_TOKENS, "the estimate of the answer is charged, and the prompt"


async def test_an_answer_after_refused_stream_options_is_charged() -> None:
    async def script(peer: Peer, request: bytes) -> None:
        if b"stream_options" in request:
            await peer.send(whole(b'{"error":{"message":"unknown field stream_options"}}', "400 Bad Request"))
        else:
            event = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
            await peer.send(STREAM_HEAD + chunk(event * 9 + b"data: [DONE]\n\n") + STREAM_END)

    async with serving_script(script, **LIMITED) as (proxy, _):
        answer = await proxy.chat(BODY | {"stream": True})
        assert answer.status == 200
        await proxy.settled()
        assert accounts(proxy)[2] >= 2 * 9


LONG = "x" * BUFFERED_BYTES_MAX
BAD = json.dumps({"error": {"message": f"validation error, input: {LONG}", "type": "BadRequestError", "code": 400}})
EVENT = f'data: {{"error":{{"message":"bad","code":400}}}}\n\n:{LONG}\n\n'


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (whole(BAD.encode(), "400 Bad Request"), 400, "validation error, input: x"),
        (STREAM_HEAD + chunk(EVENT.encode()) + STREAM_END, 502, "not passed on"),
    ],
    ids=["answer", "event"],
)
async def test_a_refusal_that_is_too_long_is_free_and_its_beginning_is_passed_on(
    answer: bytes, status: int, says: str
) -> None:
    """Engines repeat the refused request."""

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(answer)

    async with serving_script(script, **LIMITED) as (proxy, _):
        got = await proxy.chat(BODY | {"stream": status == 502})
        assert (got.status, got.headers["content-type"], list(got.json)) == (status, "application/json", ["error"])
        assert says in got.json["error"]["message"]
        assert got.json["error"]["code"] == status
        assert len(got.body) < 10_000
        await proxy.settled()
        assert accounts(proxy)[1:3] == (1_000_000, 0.0)
