"""A batch against small servers: retries, refusals, signals, and the exit code."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from llmproxy.tools.batch import BatchError, BatchOptions, run, window
from llmproxy.tools.top import ProxyAddress
from tests.tools.batch.files import line, read, write

Answer = Callable[[web.Request, str], Awaitable[web.Response]]
DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "PAUSE_S", 0.001)


async def fine(_: web.Request, text: str) -> web.Response:
    return web.json_response({"text": text, "usage": USAGE}, headers={"x-request-id": f"id of {text}"})


def refusal(status: int, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": f"no ({status})"}}, status=status, headers=headers)


class Server:
    """A server that counts the requests of each line, by the last word of its prompt."""

    def __init__(self, answer: Answer = fine) -> None:
        self.asked: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.models = web.json_response({"data": [{"id": "m"}]})
        self.others: dict[str, int] = {}
        self._answer = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            models = self.models  # An answer can be sent only once.
            return web.Response(body=models.body, status=models.status, content_type=models.content_type)
        if request.method == "GET":
            return refusal(self.others.get(request.path, 404))
        text = (await request.json())["messages"][0]["content"].split()[-1]
        self.asked[text] += 1
        self.headers.append(dict(request.headers))
        return await self._answer(request, text)


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        yield str(running.make_url("/"))


def options(url: str, folder: Path, **fields: Any) -> BatchOptions:
    given = {"in_flight": None, "criticality": "sheddable", "attempts": 3} | fields
    return BatchOptions(folder / "b.jsonl", ProxyAddress.parsed(url, "k"), folder / "r.jsonl", **given)


async def sent(server: Server, folder: Path, **fields: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """Returns the exit code and the results by custom_id. No result may be there twice."""
    async with serving(server) as url:
        code = await run(options(url, folder, **fields))
    found = read(folder / "r.jsonl")
    by_name = {one["custom_id"]: one for one in found}
    assert len(by_name) == len(found)
    return code, by_name


async def test_each_answer_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "b.jsonl", map(line, range(50)))
    server = Server()
    code, found = await sent(server, tmp_path)
    assert code == 0
    assert set(found) == set(map(str, range(50)))
    assert set(server.asked.values()) == {1}
    assert found["7"] == {
        "id": found["7"]["id"],
        "custom_id": "7",
        "response": {"status_code": 200, "request_id": "id of 7", "body": {"text": "7", "usage": USAGE}},
        "error": None,
    }
    assert server.headers[0]["x-llm-d-inference-objective"] == "sheddable"
    assert server.headers[0]["Authorization"] == "Bearer k"
    assert "50 of 50 requests have a result, 0 of them failed. 150 prompt tokens, 100 " in capsys.readouterr().out


async def test_a_second_run_sends_only_the_rest(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", map(line, range(20)))
    await sent(Server(), tmp_path)
    kept = (tmp_path / "r.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "r.jsonl").write_text("".join(kept) + '{"custom_id":"torn')
    server = Server()
    code, found = await sent(server, tmp_path)
    assert (code, len(found), server.asked.total()) == (0, 20, 8)
    server = Server()
    assert (await sent(server, tmp_path))[0] == 0
    assert server.asked.total() == 0


@pytest.mark.parametrize("result", ["2", "0"])
async def test_results_of_another_batch_are_refused(tmp_path: Path, result: str) -> None:
    write(tmp_path / "b.jsonl", map(line, range(2)))
    await sent(Server(), tmp_path)
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write(f'{{"custom_id":"{result}","response":null}}\n')
    with pytest.raises(BatchError, match="choose another --out"):
        await sent(Server(), tmp_path)


@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry-After": "0"}), (503, {}), (500, {}), (0, {})])
async def test_refused_requests_are_sent_again(tmp_path: Path, status: int, headers: dict[str, str]) -> None:
    async def answer(request: web.Request, text: str) -> web.Response:
        if server.asked[text] < 3:
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
            return refusal(status or 500, **headers)
        return await fine(request, text)

    server = Server(answer)
    write(tmp_path / "b.jsonl", map(line, range(10)))
    code, found = await sent(server, tmp_path)
    assert code == 0
    assert set(server.asked.values()) == {3}
    assert all(one["response"]["status_code"] == 200 for one in found.values())


async def test_a_refusal_that_names_a_time_is_no_attempt(tmp_path: Path) -> None:
    async def answer(request: web.Request, text: str) -> web.Response:
        return refusal(429, **{"Retry-After": "0"}) if server.asked[text] < 9 else await fine(request, text)

    server = Server(answer)
    write(tmp_path / "b.jsonl", [line(1)])
    assert (await sent(server, tmp_path, attempts=1))[0] == 0


@pytest.mark.parametrize(("status", "headers"), [(400, {}), (404, {}), (422, {}), (500, {"x-should-retry": "false"})])
async def test_errors_that_would_come_again_are_results(tmp_path: Path, status: int, headers: dict[str, str]) -> None:
    async def answer(request: web.Request, text: str) -> web.Response:
        return refusal(status, **headers) if text == "3" else await fine(request, text)

    server = Server(answer)
    write(tmp_path / "b.jsonl", map(line, range(6)))
    code, found = await sent(server, tmp_path)
    assert (code, server.asked["3"]) == (1, 1)
    assert found["3"]["response"]["status_code"] == status
    assert found["3"]["error"] is None


async def test_after_the_last_attempt_the_result_is_an_error(tmp_path: Path) -> None:
    async def answer(request: web.Request, text: str) -> web.Response:
        return refusal(503) if text == "0" else await fine(request, text)

    server = Server(answer)
    write(tmp_path / "b.jsonl", map(line, range(6)))
    code, found = await sent(server, tmp_path)
    assert (code, server.asked["0"]) == (1, 3)
    assert found["0"]["response"]["status_code"] == 503
    assert found["0"]["error"] == {
        "code": "attempts_failed",
        "message": "3 attempts failed, the last with 503: no (503)",
    }


@pytest.mark.parametrize("status", [0, 500])
async def test_a_request_that_always_fails_is_a_result_if_the_server_answers(tmp_path: Path, status: int) -> None:
    async def answer(request: web.Request, _: str) -> web.Response:
        if status == 0:
            assert request.transport is not None
            request.transport.abort()
        return refusal(status or 500)

    write(tmp_path / "b.jsonl", [line("0")])
    code, found = await sent(Server(answer), tmp_path)
    assert (code, found["0"]["error"]["code"]) == (1, "attempts_failed")


async def test_no_request_fails_if_the_server_went_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request, _: str) -> web.Response:
        server.models = refusal(502)
        assert request.transport is not None
        request.transport.abort()
        return refusal(500)

    server = Server(answer)
    write(tmp_path / "b.jsonl", map(line, range(3)))
    assert await sent(server, tmp_path) == (3, {})
    assert "answers no request: Server disconnected" in capsys.readouterr().out


@pytest.mark.parametrize("status", [503, 401])
async def test_a_server_that_answers_nothing_any_more_costs_no_request(
    tmp_path: Path, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(request: web.Request, text: str) -> web.Response:
        return await fine(request, text) if int(text) < 4 else refusal(status)

    write(tmp_path / "b.jsonl", map(line, range(40)))
    code, found = await sent(Server(answer), tmp_path, in_flight=2)
    assert (code, set(found)) == (3, {"0", "1", "2", "3"})
    assert f"no ({status})" in capsys.readouterr().out
    assert (await sent(Server(), tmp_path))[0] == 0


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (refusal(401), "refuses the key"),
        (web.Response(text="<html>"), "gives no list of models"),
        (web.json_response({"data": [{"id": "n"}]}), "does not have the models of the batch: m; it has n"),
        (web.json_response({}, status=404), "gives no list of models: /v1/models answers 404"),
    ],
)
async def test_a_wrong_server_gets_no_request(tmp_path: Path, models: web.Response, message: str) -> None:
    write(tmp_path / "b.jsonl", [line(1)])
    server = Server()
    server.models = models
    with pytest.raises(BatchError, match=message):
        await sent(server, tmp_path)
    assert not server.asked
    with pytest.raises(BatchError, match="is not reachable"):
        await run(options("http://127.0.0.1:1", tmp_path))


@pytest.mark.parametrize("status", [200, 503])
async def test_a_model_that_is_served_but_not_listed_is_sent(tmp_path: Path, status: int) -> None:
    """Such as a name of a pattern, or a model that is scaled to zero."""

    async def answer(request: web.Request, text: str) -> web.Response:
        return await fine(request, text) if text == "0" else refusal(500)

    write(tmp_path / "b.jsonl", [line(name) | {"body": line(name)["body"] | {"model": "org/m?"}} for name in range(2)])
    server = Server(answer)
    server.others = {"/v1/models/org/m?": status}
    code, found = await sent(server, tmp_path)
    assert (code, found["1"]["error"]["code"]) == (1, "attempts_failed")


async def test_answers_that_are_no_json_stay_on_one_line(tmp_path: Path) -> None:
    bodies = {"0": '{\n "a": [1,\n 2.50] }', "1": "<html>\n\u2028</html>", "2": '{"a": "\\ud800"}'}

    async def answer(_: web.Request, text: str) -> web.Response:
        return web.Response(text=bodies[text], status=413 if text == "1" else 200)

    write(tmp_path / "b.jsonl", map(line, range(3)))
    _, found = await sent(Server(answer), tmp_path)
    assert [found[name]["response"]["body"] for name in bodies] == [{"a": [1, 2.5]}, bodies["1"], bodies["2"]]
    assert (await sent(Server(), tmp_path))[0] == 1


@pytest.mark.parametrize("status", [200, 404, 503])
async def test_deeply_nested_answers_are_texts(tmp_path: Path, status: int) -> None:
    async def answer(_: web.Request, __: str) -> web.Response:
        return web.Response(text=DEEP, status=status)

    write(tmp_path / "b.jsonl", map(line, range(2)))
    code, found = await sent(Server(answer), tmp_path)
    assert (code, len(found)) == {200: (0, 2), 404: (1, 2), 503: (3, 0)}[status]
    server = Server()
    server.models = web.Response(text=DEEP)
    write(tmp_path / "b.jsonl", map(line, range(3)))
    with pytest.raises(BatchError, match="gives no list of models"):
        await sent(server, tmp_path)


@pytest.mark.parametrize(("signals", "kept"), [(1, 2), (2, 0)])
async def test_the_first_signal_ends_open_requests_and_the_second_gives_them_up(
    tmp_path: Path, signals: int, kept: int
) -> None:
    reached, end = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request, text: str) -> web.Response:
        if server.asked.total() == 2:
            reached.set()
        await end.wait()
        return await fine(request, text)

    server = Server(answer)
    write(tmp_path / "b.jsonl", map(line, range(9)))
    async with serving(server) as url:
        task = asyncio.create_task(run(options(url, tmp_path, in_flight=2)))
        await reached.wait()
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)  # The loop reads signals from a socket.
        if signals == 1:
            end.set()
        assert await task == 3
        end.set()
    assert len(read(tmp_path / "r.jsonl")) == kept
    assert server.asked.total() == 2


async def test_a_full_disk_stops_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "b.jsonl", map(line, range(9)))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    # Results that are written may still not reach the disk.
    for function in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"llmproxy.tools.batch.results.os.{function}", full)
            code, found = await sent(Server(), tmp_path)
        assert (code, len(found)) == (3, {"write": 0, "fsync": 9}[function])
        shown = capsys.readouterr().out
        assert f"{len(found)} of 9 requests have a result" in shown
        assert "r.jsonl: No space left on device. The same command goes on." in shown
    assert (await sent(Server(), tmp_path))[0] == 0


# --- how many at once -------------------------------------------------------------------------------------------------


def test_the_window_grows_until_requests_wait_and_shrinks_once_for_each_refused_round() -> None:
    one = window.Window()

    def rounds(count: int, wait_s: float) -> None:
        for _ in range(count):
            one.sending = int(one.size)
            one.answered(wait_s)

    rounds(60, 0.0)
    assert one.size == window.FIRST + 60
    rounds(100, 2.0)
    assert one.size == window.FIRST + 60
    rounds(64, 0.0)
    assert window.FIRST + 60.9 < one.size < window.FIRST + 61
    for _ in range(5):
        one.refused(1.0, 3.0)
    assert 32 < one.size < 33
    for sent_s in range(4, 20):
        one.refused(sent_s, sent_s)
    assert (one.size, one.has_room) == (1, False)


def test_a_fixed_window_stays() -> None:
    fixed = window.Window(7)
    fixed.refused(1.0, 2.0)
    fixed.sending = 7
    fixed.answered(0.0)
    assert fixed.size == 7


def test_pauses_grow_and_end() -> None:
    assert [round(window.pause_s(failures) / window.PAUSE_S) for failures in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert window.pause_s(99) == window.PAUSE_MAX_S
    assert [window.retry_after_s(text) for text in ("7", "0.5", None, "soon", "-1", "inf", "nan")] == [
        7.0,
        0.5,
        *[None] * 5,
    ]
