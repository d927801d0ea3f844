"""The record of a shadow: a line for each request, with its tenant, band, lengths and times, and without its text."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from httptools import HttpParserCallbackError, HttpParserUpgrade

from llmproxy.config import Config, hash_of
from llmproxy.lab.traces import open_trace
from llmproxy.tools.shadow import recorder
from llmproxy.tools.shadow.recorder import Recorder, Tally
from llmproxy.tools.shadow.watcher import BODY_BYTES_MAX, HELD_BYTES_MAX, Held, HttpWatcher

USAGE = {"prompt_tokens": 300, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 128}}
LONG = "a text that two prompts share, " * 40


class Day:
    """Exchanges that are recorded, on a clock that the test moves."""

    def __init__(self, folder: Path, config: Config | None = None, file_bytes_max: int = 1 << 20) -> None:
        self.file = folder / "requests.jsonl"
        self.now_s = 0.0
        self.said: list[str] = []
        self.tally, self.held = Tally(self.said.append), Held()
        self.recorder = Recorder(
            config or Config(), ["adapter"], FileIO(self.file, "x"), file_bytes_max, self.held, self.tally,
            lambda: self.now_s,
        )  # fmt: skip

    def connection(self) -> HttpWatcher:
        return HttpWatcher("127.0.0.1", self.held, lambda: self.now_s, self.recorder.take)

    def exchange(self, asked: bytes, answered: Sequence[bytes], *, left: bool | None = None) -> None:
        """An exchange; each part of the answer comes a second after the last."""
        watcher = self.connection()
        watcher.asked(asked)
        for part in answered:
            self.now_s += 1.0
            watcher.answered(part)
        if left is not None:
            watcher.closed(by_client=left)

    async def lines(self) -> list[dict[str, Any]]:
        await self.recorder.catch_up()
        self.recorder.close()
        return [json.loads(line) for line in self.file.read_text().splitlines()][1:]


def question(text: str = "hello", path: str = "/v1/chat/completions", key: str = "", **more: Any) -> bytes:
    fields = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return post(json.dumps(fields).encode(), path, f"Authorization: Bearer {key}\r\n" if key else "")


def post(body: bytes, path: str = "/v1/chat/completions", fields: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{fields}Content-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def answer(status: int = 200, **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status, len(body), body
    )  # fmt: skip


def stream(*texts: str, usage: Any = None) -> list[bytes]:
    events: list[Any] = [{"id": "1", "choices": [{"index": 0, "delta": {"content": text}}]} for text in ("", *texts)]
    events += [{"id": "1", "choices": [], "usage": usage}] if usage else []
    said = [b"data: %b\n\n" % json.dumps(event).encode() for event in events] + [b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(one), one) for one in said), b"0\r\n\r\n"]


async def test_an_answer_in_one_piece(tmp_path: Path) -> None:
    day = Day(tmp_path)
    day.now_s = 5.0
    day.exchange(question(LONG), [answer(usage=USAGE)])
    (line,) = await day.lines()
    line = {name: value for name, value in line.items() if name not in ("at_s", "blocks")}
    assert line == {
        "status": 200, "model": "m", "tenant": "default", "criticality": 0, "prompt_tokens": 300, "output_tokens": 7,
        "cached_tokens": 128, "stream": False, "duration_s": 1.0, "outcome": "completed",
    }  # fmt: skip


async def test_a_stream_has_times_and_its_events_are_counted_without_usage(tmp_path: Path) -> None:
    day = Day(tmp_path)
    day.exchange(question(stream=True), stream("a", "b", "c"))
    day.exchange(question(stream=True), stream("a", "b", "c", usage=USAGE))
    counted, known = await day.lines()
    assert (counted["ttft_s"], counted["output_tokens"], counted["duration_s"]) == (2.0, 3, 7.0)
    assert counted["tpot_s"] == 2.5
    assert known["output_tokens"] == 7


async def test_no_text_is_recorded_and_equal_beginnings_share_blocks(tmp_path: Path) -> None:
    day = Day(tmp_path)
    for text in (LONG + "one", LONG + "two", "other " + LONG):
        day.exchange(question(text), [answer(usage=USAGE)])
    one, two, other = await day.lines()
    assert "text" not in day.file.read_text()
    assert one["blocks"] == two["blocks"] != other["blocks"]
    assert one["blocks"]
    (tmp_path / "again").mkdir()
    again = Day(tmp_path / "again")
    again.exchange(question(LONG), [answer(usage=USAGE)])
    assert (await again.lines())[0]["blocks"] != one["blocks"]


async def test_the_next_turn_shares_the_answer(tmp_path: Path) -> None:
    day = Day(tmp_path)
    said = {"role": "assistant", "content": LONG}
    day.exchange(question(LONG), [answer(choices=[{"message": said}], usage=USAGE | {"completion_tokens": 300})])
    turns = [{"role": "user", "content": LONG}, said, {"role": "user", "content": "go on"}]
    day.exchange(question(messages=turns), [answer(usage=USAGE | {"prompt_tokens": 620})])
    first, second = await day.lines()
    assert len(first["blocks"]) == 4
    assert second["blocks"][:4] == first["blocks"]


async def test_the_configuration_names_tenant_and_band(tmp_path: Path) -> None:
    tenant = {"name": "research", "keys": [hash_of("secret-1")], "criticality": "critical"}
    day = Day(tmp_path, Config.model_validate({"tenants": [tenant], "models": [{"name": "fast", "target": "m"}]}))
    day.exchange(question(key="secret-1", model="fast"), [answer(usage=USAGE)])
    day.exchange(question(key="unknown"), [answer(usage=USAGE)])
    known, unknown = await day.lines()
    assert (known["tenant"], known["criticality"], known["model"]) == ("research", 100, "m")
    assert unknown["tenant"] == "default"
    assert day.tally.counts["llmproxy would refuse with 401"] == 1
    assert "secret" not in day.file.read_text()


async def test_without_tenants_each_key_is_one(tmp_path: Path) -> None:
    day = Day(tmp_path)
    for key in ("secret-1", "secret-2", "secret-1", ""):
        day.exchange(question(key=key, model="adapter"), [answer(usage=USAGE)])
    lines = await day.lines()
    assert [line["tenant"] for line in lines] == ["key-1", "key-2", "key-1", "default"]
    assert {line["adapter"] for line in lines} == {"adapter"}


@pytest.mark.parametrize(
    ("parts", "left", "outcome"),
    [
        ([answer(503, error={"message": "full"})], None, "upstream_status"),
        (stream("a", "b")[:3], True, "cancelled"),
        (stream("a", "b")[:3], False, "broken_stream"),
        ([], False, "upstream_status"),
        ([b"HTTP/1.0 200 OK\r\n\r\n{}"], False, "completed"),
    ],
)
async def test_how_requests_end(tmp_path: Path, parts: list[bytes], left: bool | None, outcome: str) -> None:
    day = Day(tmp_path)
    day.exchange(question(stream=True), parts, left=left)
    assert [line["outcome"] for line in await day.lines()] == [outcome]


async def test_what_costs_an_engine_nothing_is_not_recorded(tmp_path: Path) -> None:
    day = Day(tmp_path)
    day.exchange(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", [answer(data=[])])
    day.exchange(question(), [answer(404, error={"message": "no such model"})])
    day.exchange(post(b"no JSON"), [answer(400, error={"message": "no"})])
    assert await day.lines() == []
    assert day.tally.counts["other paths"] == 1


async def test_requests_of_one_connection_and_interim_answers(tmp_path: Path) -> None:
    day = Day(tmp_path)
    watcher = day.connection()
    watcher.asked(question() + question())
    assert watcher.busy
    watcher.answered(b"HTTP/1.1 100 Continue\r\n\r\n" + answer(usage=USAGE) + answer(usage=USAGE))
    assert len(await day.lines()) == 2


@pytest.mark.parametrize("size", [BODY_BYTES_MAX + 1, HELD_BYTES_MAX + 1])
async def test_large_bodies_are_not_held(tmp_path: Path, size: int) -> None:
    day = Day(tmp_path)
    watcher = day.connection()
    watcher.asked(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    while size > 0:
        watcher.asked(b"x" * min(size, 1 << 20))
        size -= 1 << 20
        assert day.held.bytes <= BODY_BYTES_MAX
    watcher.answered(answer(usage=USAGE))
    assert await day.lines() == []
    assert day.tally.counts["unread: too large, or too many at once"] == 1
    assert day.held.bytes == 0


async def test_of_a_long_answer_the_end_is_kept(tmp_path: Path) -> None:
    day = Day(tmp_path)
    day.exchange(question(), [answer(text="x" * (3 << 20), usage=USAGE)])
    (line,) = await day.lines()
    assert line["output_tokens"] == 7
    assert day.held.bytes == 0


async def test_a_bug_in_the_recorder_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("a bug")

    day = Day(tmp_path)
    monkeypatch.setattr("llmproxy.tools.shadow.recorder.usage_in_tail", raises)
    for _ in range(3):
        day.exchange(question(), [answer(usage=USAGE)])
    assert await day.lines() == []
    assert day.tally.counts["not recorded"] == 3
    assert len(day.said) == 1
    assert day.held.bytes == 0


async def test_a_long_record_is_bounded_on_disk_and_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "KEYS_MAX", 50)
    day = Day(tmp_path, file_bytes_max=1 << 16)
    every_s, grown_from, count = 216.0, 100, 400
    try:
        for number in range(count):
            if number == grown_from:
                tracemalloc.start()
            asked = question(f"{number} {LONG}", key=f"key {number}", stream=True)
            day.exchange(asked, [b"".join(stream("a", "b", usage=USAGE))])
            day.now_s += every_s
            await day.recorder.catch_up()
            day.tally.minute(0)
        gc.collect()
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    recorded = len(await day.lines())
    assert grown_bytes < 100 * (count - grown_from)
    assert 0 < day.file.stat().st_size <= 1 << 16
    assert 0 < recorded == count - day.tally.counts["not recorded, because the record is full"] < count
    assert day.said == ["The record is full and ends here: --record-mb sets its size."]
    assert day.tally.minute(0).endswith("the record is full")


async def test_the_record_is_a_trace(tmp_path: Path) -> None:
    day = Day(tmp_path)
    day.exchange(question(LONG, key="k"), [answer(usage=USAGE)])
    day.exchange(question(LONG, key="k"), [], left=False)
    lines = await day.lines()
    trace = open_trace(day.file)
    first, second = trace.arrivals()
    assert first.blocks == second.blocks == tuple(lines[0]["blocks"])
    assert trace.block_tokens % 16 == 0
    assert (first.tenant, first.prompt_tokens, first.output_tokens, first.guessed) == ("key-1", 300, 7, False)
    assert second.guessed


async def test_a_connection_without_a_request_is_idle(tmp_path: Path) -> None:
    day = Day(tmp_path)
    assert not day.connection().busy
    await day.lines()


async def test_a_forgotten_connection_holds_nothing(tmp_path: Path) -> None:
    day = Day(tmp_path)
    watcher = day.connection()
    watcher.asked(question())
    assert day.held.bytes
    watcher.forget()
    assert day.held.bytes == 0
    await day.lines()


@pytest.mark.parametrize(
    "fields", ["Content-Length: 99\r\n", "Transfer-Encoding: chunked\r\n", "Content-Length: 0\r\n", ""]
)
async def test_answers_to_head_have_no_body(tmp_path: Path, fields: str) -> None:
    day = Day(tmp_path)
    watcher = day.connection()
    for _ in range(2):
        watcher.asked(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert watcher.busy
        watcher.answered(f"HTTP/1.1 200 OK\r\n{fields}\r\n".encode())
        assert not watcher.busy
    watcher.asked(question())
    watcher.answered(answer(usage=USAGE))
    assert len(await day.lines()) == 1
    assert day.tally.counts["other paths"] == 2


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_h2c_that_the_router_ignores(tmp_path: Path, step: int, chunked: bool) -> None:
    """As Java's HttpClient sends it."""
    day = Day(tmp_path)
    watcher = day.connection()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\nUpgrade: h2c\r\n"
    head, _, body = question("hello").partition(b"\r\n\r\n")
    if chunked:
        head = head.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    sent = head.replace(b"Host: x\r\n", b"Host: x\r\n" + offer) + b"\r\n\r\n" + body
    for at in range(0, len(sent), step):
        watcher.asked(sent[at : at + step])
    watcher.answered(answer(usage=USAGE))
    watcher.asked(question("again"))
    watcher.answered(answer(usage=USAGE))
    assert not watcher.busy
    assert [(line["model"], line["outcome"]) for line in await day.lines()] == [("m", "completed")] * 2


async def test_an_accepted_offer_of_h2c_ends_the_watching(tmp_path: Path) -> None:
    day = Day(tmp_path)
    watcher = day.connection()
    watcher.asked(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n")
    with pytest.raises(HttpParserUpgrade):
        watcher.answered(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    await day.lines()


async def test_a_body_after_an_answer_to_head_ends_the_watching(tmp_path: Path) -> None:
    day = Day(tmp_path)
    watcher = day.connection()
    watcher.asked(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(HttpParserCallbackError):
        watcher.answered(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    await day.lines()


async def test_the_address_of_a_tunnel_ends_the_watching(tmp_path: Path) -> None:
    day = Day(tmp_path)
    watcher = day.connection()
    with pytest.raises(HttpParserCallbackError):
        watcher.asked(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await day.lines() == []
