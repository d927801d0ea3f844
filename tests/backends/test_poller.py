"""The poller against a server that answers as a recorded one does, poll by poll on a clock that the test advances."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from llmproxy.backends import poller as poller_module
from llmproxy.backends.metrics_text import LABELS_BYTES_MAX, METRIC_NAMES
from tests.backends import polling
from tests.backends.polling import Answer, Bench, hang, hang_up, load, never_end, saying
from tests.upstream.raw_server import closed_port, refuse_sockets

# --- one poll ---------------------------------------------------------------------------------------------------------


async def test_the_first_poll_asks_everything_and_ends_with_one_event(bench: Bench) -> None:
    pause_s = await bench.poller().poll_once()
    assert bench.vllm.asked == ["/health", "/v1/models", "/metrics/"]
    assert bench.sink.take() == ["listed", "observe", "answered"]
    assert [card.name for card in bench.sink.listings[0].cards] == ["tiny", "lora-0"]
    assert (bench.sink.readings[0].running, bench.sink.readings[0].waiting) == (3, 1)
    assert 0.16 <= pause_s <= 0.2


async def test_models_can_be_read_between_polls(bench: Bench) -> None:
    poller = bench.poller()
    await poller.list_now()
    assert bench.vllm.asked == ["/v1/models"]
    assert bench.sink.take() == ["listed"]
    for answer in (saying("", 500), saying("no list"), hang_up):
        bench.vllm.answers["/v1/models"] = answer
        await poller.list_now()
    assert bench.sink.take() == []


async def test_an_older_listing_does_not_replace_a_newer_one(bench: Bench) -> None:
    asked, let = asyncio.Event(), asyncio.Event()

    async def late(_: web.Request) -> web.StreamResponse:
        asked.set()
        await let.wait()
        return web.Response(text=polling.MODELS)

    poller = bench.poller()
    bench.vllm.answers["/v1/models"] = late
    poll_once = asyncio.create_task(poller.poll_once())
    await asked.wait()
    bench.now += 0.1
    bench.vllm.answers["/v1/models"] = saying('{"data":[{"id":"tiny"},{"id":"new","parent":"tiny"}]}')
    await poller.list_now()
    let.set()
    await poll_once
    assert bench.sink.take() == ["listed", "observe", "answered"]
    assert [card.name for card in bench.sink.listings[0].cards] == ["tiny", "new"]


@pytest.mark.parametrize(("api_key", "sent"), [("s3cret", "Bearer s3cret"), (None, None)])
async def test_a_poll_sends_its_key_and_the_needed_metric_names(
    bench: Bench, api_key: str | None, sent: str | None
) -> None:
    await bench.poller(api_key=api_key).poll_once()
    assert bench.vllm.requests[-1].query.getall("name[]") == list(METRIC_NAMES)
    for request in bench.vllm.requests:
        assert (request.headers.get("Authorization"), request.headers["Accept-Encoding"]) == (sent, "identity")


async def test_a_reading_is_stamped_with_the_time_its_scrape_was_sent(bench: Bench) -> None:
    async def slow(_: web.Request) -> web.StreamResponse:
        bench.now += 0.7
        return web.Response(text=polling.NEEDED)

    bench.vllm.answers["/metrics/"] = slow
    await bench.poller().poll_once()
    assert bench.sink.readings[0].taken_at_s == 1000.0


@pytest.mark.parametrize(("works", "running", "waiting"), [(True, 0, 0), (False, 1, 0), (False, 0, 1), (False, 0, 0)])
async def test_each_question_has_its_own_interval(bench: Bench, works: bool, running: int, waiting: int) -> None:
    bench.works = works
    bench.vllm.answers["/metrics/"] = saying(load(running, waiting))
    polls = await bench.polls(bench.poller(), 10.0)
    asked = Counter(bench.vllm.asked)
    assert 10 <= asked["/health"] <= 13
    assert 5 <= asked["/v1/models"] <= 7
    assert asked["/metrics"] == 0
    if works or running or waiting:
        assert 50 <= asked["/metrics/"] <= polls <= 90
    else:
        assert 10 <= asked["/metrics/"] <= asked["/health"]


async def test_an_idle_backend_is_read_at_once_when_it_gets_work(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.backends.poller.HEALTH_INTERVAL_S", 3600.0)
    bench.times = polling.Times(interval_s=0.001, page_interval_s=3600.0, models_interval_s=3600.0)
    bench.works = False
    read: asyncio.Queue[web.Request] = asyncio.Queue()

    async def page(request: web.Request) -> web.StreamResponse:
        read.put_nowait(request)
        return web.Response(text=load(0, 0))

    bench.vllm.answers["/metrics/"] = page
    async with bench.running():
        await read.get()
        # Not before its answer was taken in.
        while "answered" not in bench.sink.seen:  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0)
        bench.works = True
        await read.get()
    asked = [path for path in bench.vllm.asked if path != "/server_info"]
    assert asked[:4] == ["/health", "/v1/models", "/metrics/", "/metrics/"]


@pytest.mark.parametrize(("path", "looks_s"), [("/metrics/", 0.2), ("/metrics", 1.0)])
async def test_an_idle_backend_is_checked_for_work_at_the_poll_interval(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str, looks_s: float
) -> None:
    bench.works = False
    bench.vllm.answers = {path: saying(load(0, 0)), "/v1/models": saying(polling.MODELS)}
    pauses_s: list[float] = []
    turn = asyncio.sleep

    async def passing(pause_s: float) -> None:
        pauses_s.append(pause_s)
        bench.now += pause_s
        if len(pauses_s) == 20:
            raise asyncio.CancelledError
        await turn(0)

    poller = bench.poller()
    await poller.poll_once()
    monkeypatch.setattr(asyncio, "sleep", passing)
    monkeypatch.setattr(poller, "_ask_limit", asyncio.Event().wait)
    with pytest.raises(asyncio.CancelledError):
        await poller.run()
    monkeypatch.undo()
    assert 0.8 * looks_s <= max(pauses_s) <= looks_s


# --- where readings come from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [saying(status=404), saying(status=307), saying(polling.PAGE), saying("", 200)])
async def test_the_full_page_is_read_at_its_own_interval(bench: Bench, answer: Answer) -> None:
    bench.vllm.answers["/metrics/"] = answer
    poller = bench.poller()
    await bench.polls(poller, 9.0)
    assert bench.vllm.asked.count("/metrics/") == 1
    assert 9 <= bench.vllm.asked.count("/metrics") <= 12
    assert bench.sink.readings[0].running == 3


async def test_a_large_filtered_page_is_read_at_the_slow_interval(bench: Bench) -> None:
    bench.vllm.answers["/metrics/"] = saying(polling.NEEDED + 'vllm:lora_requests_info{max_lora="2"} 1.0\n' * 1000)
    await bench.polls(bench.poller(), 9.0)
    assert 9 <= bench.vllm.asked.count("/metrics/") <= 12
    assert "/metrics" not in bench.vllm.asked


async def test_a_server_without_vllm_metrics_is_watched_but_never_read(bench: Bench) -> None:
    bench.vllm.answers = {"/v1/models": saying(polling.MODELS)}
    polls = await bench.polls(bench.poller(), 5.0)
    assert set(bench.sink.seen) == {"listed", "answered"}
    assert bench.sink.seen.count("answered") == polls
    assert bench.vllm.asked.count("/metrics") == 1


async def test_looks_again_for_a_better_source_now_and_then(bench: Bench) -> None:
    filtered = bench.vllm.answers.pop("/metrics/")
    poller = bench.poller()
    await bench.polls(poller, 5.0)
    bench.vllm.answers["/metrics/"] = filtered
    await bench.polls(poller, 10.0)
    bench.vllm.asked.clear()
    await bench.polls(poller, 2.0)
    assert "/metrics" not in bench.vllm.asked
    assert bench.vllm.asked.count("/metrics/") >= 10


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer", "trouble", "words"),
    [
        ("/health", saying(status=503), "unhealthy", "/health answered 503"),
        ("/health", hang_up, "no_answer", "/health"),
        ("/health", polling.no_status, "garbage", "/health: 000 is no status"),
        ("/v1/models", saying(status=500), "unhealthy", "/v1/models answered 500"),
        ("/v1/models", saying(status=401), "key", "api_key"),
        ("/v1/models", saying(status=403), "key", "api_key"),
        ("/v1/models", saying(status=307), "garbage", "answered 307"),
        ("/v1/models", saying("<html>"), "garbage", "not JSON"),
        ("/v1/models", never_end, "garbage", "larger than 100000 bytes"),
        ("/v1/models", polling.explode, "garbage", "larger than 100000 bytes"),
        ("/health", hang, "no_answer", "/health"),
    ],
)
async def test_the_first_failed_question_ends_the_poll(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str, answer: Answer, trouble: str, words: str
) -> None:
    monkeypatch.setattr(poller_module, "BODY_BYTES_MAX", 100_000)
    bench.times.timeout_s = 0.05 if answer is hang else 5.0
    bench.vllm.answers[path] = answer
    pause_s = await bench.poller().poll_once()
    assert bench.sink.take() == (["timed out", trouble] if answer is hang else [trouble])
    assert (pause_s <= bench.times.interval_s) == (answer is hang), "the time limit was a pause"
    assert words in bench.sink.details[0]
    assert bench.vllm.asked[-1] == path


@pytest.mark.parametrize(("answer", "trouble"), [(hang, "no_answer"), (hang_up, "no_answer"), (never_end, "garbage")])
async def test_an_unreadable_metrics_page_is_no_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answer: Answer, trouble: str
) -> None:
    monkeypatch.setattr(poller_module, "BODY_BYTES_MAX", 100_000)
    poller = bench.poller()
    bench.times.timeout_s = 0.5 if answer is hang else 5.0
    bench.vllm.answers["/metrics/"] = answer
    for _ in range(2):
        bench.now += await poller.poll_once()
        seen = bench.sink.take()
        assert seen[-2:] == [f"unread: {trouble}", "answered"]
        assert ("timed out" in seen) == (answer is hang)
        assert bench.vllm.asked[-1] == "/health", "whether it is well is asked anew"
    bench.vllm.answers["/metrics/"] = saying(polling.NEEDED)
    bench.now += bench.times.page_interval_s
    await poller.poll_once()
    assert bench.sink.take()[-2:] == ["observe", "answered"]


@pytest.mark.parametrize(("answer", "trouble"), [(hang, "no_answer"), (saying(status=503), "unhealthy")])
async def test_health_that_fails_after_hanging_metrics_is_a_failure(bench: Bench, answer: Answer, trouble: str) -> None:
    poller = bench.poller()
    await poller.poll_once()
    bench.sink.take()

    async def falls_ill(request: web.Request) -> web.StreamResponse:
        bench.vllm.answers["/health"] = answer
        return await hang_up(request)

    bench.times.timeout_s = 0.5
    bench.vllm.answers["/metrics/"] = falls_ill
    bench.now += bench.times.interval_s
    await poller.poll_once()
    timed_out = ["timed out"] if answer is hang else []
    assert bench.sink.take() == ["unread: no_answer", *timed_out, trouble], "nothing timed out where a connection broke"


async def test_a_page_that_is_refused_is_reported_with_its_limit(bench: Bench) -> None:
    page = polling.NEEDED + "vllm:cache_config_info{" + 'a="",' * LABELS_BYTES_MAX + "} 1\n"
    bench.vllm.answers["/metrics/"] = saying(page)
    await bench.poller().poll_once()
    assert bench.sink.take()[-2:] == ["unread: garbage", "answered"]
    assert f"more than the {LABELS_BYTES_MAX}" in bench.sink.details[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_refused_connection_is_reported_apart_and_tried_again_soon(bench: Bench, host: str) -> None:
    pause_s = await bench.poller(f"http://{host}:{closed_port()}").poll_once()
    assert bench.sink.take() == ["refused"]
    assert bench.sink.details[-1].endswith("; nothing listens there (yet): is the address right?")
    assert pause_s <= 0.2


async def test_backend_that_dies_during_a_poll_is_refused_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"/metrics" not in (head := await reader.readuntil(b"\r\n\r\n")):
            body = polling.MODELS.encode() if b"/v1/models" in head else b""
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        server.close()
        writer.close()

    monkeypatch.setattr("llmproxy.upstream.client.IDLE_DROP_S", -1.0)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    await bench.poller(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").poll_once()
    assert bench.sink.take() == ["listed", "refused"]


async def test_a_url_of_the_wrong_scheme_is_reported(bench: Bench) -> None:
    await bench.poller(bench.url.replace("http://", "https://")).poll_once()
    assert bench.sink.details[-1].endswith("; it does not speak TLS: should its URL begin with http://?")

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    # Like uvicorn with a certificate, which closes connections without TLS.
    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        await bench.poller(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").poll_once()
    assert bench.sink.details[-1].endswith("; if it speaks TLS, its URL should begin with https://")


async def test_a_backend_that_answered_before_gets_no_hint(bench: Bench) -> None:
    poller = bench.poller()
    await poller.poll_once()
    poller._url = f"http://127.0.0.1:{closed_port()}"
    await bench.polls(poller, 1.5)
    assert "refused" in bench.sink.take()
    assert bench.sink.details[-1].endswith("Connection refused")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_a_lack_of_this_machine_is_no_failure_of_the_backend(
    bench: Bench, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_sockets(monkeypatch, number)
    await bench.poller().poll_once()
    assert bench.sink.take() == ["local_failure"]
    assert os.strerror(number) in bench.sink.details[0]


async def test_an_unreachable_address_is_not_a_refusal(bench: Bench) -> None:
    # The kernel itself turns this connection down; nothing is sent.
    await bench.poller("http://255.255.255.255:9").poll_once()
    assert bench.sink.take() == ["no_answer"]


async def test_a_backend_that_comes_back_is_learned_anew(bench: Bench) -> None:
    poller = bench.poller()
    del bench.vllm.answers["/metrics/"]
    await bench.polls(poller, 1.0)
    bench.vllm.answers["/health"] = saying(status=503)
    await bench.polls(poller, 3.0)
    assert bench.sink.take()[-1] == "unhealthy"
    bench.vllm.answers |= {"/health": saying(), "/metrics/": saying(polling.NEEDED)}
    bench.vllm.asked.clear()
    await poller.poll_once()
    assert bench.vllm.asked == ["/health", "/v1/models", "/metrics/"]
    assert bench.sink.take() == ["listed", "observe", "answered"]


# --- the task ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["observe", "troubled"])
async def test_a_bug_is_logged_once_and_does_not_end_the_task(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    calls = 0
    third = asyncio.Event()

    def broken(*_: object) -> None:
        nonlocal calls
        calls += 1
        bench.now += 10.0
        if calls == 3:
            third.set()
        raise KeyError("a bug")

    monkeypatch.setattr(bench.sink, method, broken)
    if method == "troubled":
        bench.vllm.answers["/health"] = saying(status=503)
    with capture_logs() as logs:
        async with bench.running():
            await third.wait()
    assert [(entry["event"], entry["backend"]) for entry in logs] == [("poller_bug", "b")]


# --- the batch limit by its own configuration -------------------------------------------------------------------------

PUBLISHED = '{"vllm_config": {"scheduler_config": {"max_num_seqs": 8}}}'


@pytest.mark.parametrize("lost", [False, True])
async def test_a_batch_limit_is_asked_for_until_it_is_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(poller_module, "LIMIT_PAUSE_S", 0.0)

    async def hang_up_once(request: web.Request) -> web.StreamResponse:
        bench.vllm.answers["/server_info"] = saying(PUBLISHED)
        return await hang_up(request)

    bench.vllm.answers["/server_info"] = hang_up_once if lost else saying(PUBLISHED)
    async with bench.running():
        await bench.sink.limit_published.wait()
        await bench.sink.enough.wait()
    assert bench.sink.limits == [8]
    assert bench.vllm.asked.count("/server_info") == (2 if lost else 1)


async def test_a_server_that_does_not_publish_it_is_left_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller_module, "LIMIT_PAUSE_S", 0.0)
    async with bench.running():
        await bench.sink.enough.wait()
        while "/server_info" not in bench.vllm.asked:  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
    assert bench.vllm.asked.count("/server_info") == 1
    assert bench.sink.limits == []
