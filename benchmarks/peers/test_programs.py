"""The two programs in C: the mock replica and the load generator."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import measure
from benchmarks.peers.cases import Case
from benchmarks.peers.measure import Books, Window
from benchmarks.peers.test_peers import SSE
from benchmarks.proxy import Child
from llmproxy.backends.metrics_text import is_filtered, parse_reading
from llmproxy.gateway.request.json_scan import drain

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "BUILT", folder)
        for name in ("mockd", "loadgen"):
            measure.built(name)
        yield folder


@pytest.fixture
def replica(programs: Path, tmp_path: Path) -> Iterator[int]:
    """The port of one mock replica."""
    mock = Child([str(programs / "mockd"), "1"], os.sched_getaffinity(0), tmp_path / "mock.log", piped=True)
    try:
        yield int(mock.line())
    finally:
        mock.stop()


def answered(port: int, path: str, body: bytes | None = None) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        assert response.status == 200
        return response.read()


def loaded(programs: Path, case: Case, port: int, files: Sequence[Path]) -> tuple[list[str], str]:
    """The lines and the complaints of one load; a machine too busy to serve in a short window gets longer ones."""
    for seconds in (0.1, 1.0, 10.0):
        argv = [str(programs / "loadgen"), *case.load_argv(port, seconds), *map(str, files)]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        counted = json.loads(lines[2])
        if counted["requests"] or counted["failures"]:
            break
    return lines, done.stderr


@needs_compiler
def test_a_mock_replica_streams_as_many_chunks_as_it_is_asked_for(replica: int) -> None:
    ask = b'{"model":"mock","stream":true,"max_tokens":   5,"seed":100,"stream_options":{"include_usage":true}}'
    events = answered(replica, "/v1/chat/completions", ask).decode().split("\n\n")
    assert [event[:6] for event in events[:-1]] == ["data: "] * 8
    *chunks, last, usage = (json.loads(event[6:]) for event in events[:7])
    assert all(len(chunk["choices"][0]["delta"]["content"]) == 21 for chunk in chunks)
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 5
    assert events[7] == "data: [DONE]"


@needs_compiler
def test_a_mock_replica_takes_a_large_body_and_reads_its_end(replica: int) -> None:
    ask = b'{"model":"mock","messages":["' + b"x" * 3_000_000 + b'"],"stream":true,"max_tokens":2}'
    assert answered(replica, "/v1/chat/completions", ask).count(b"data: ") == 4


@needs_compiler
def test_a_mock_replica_answers_what_a_poller_asks(replica: int) -> None:
    page = answered(replica, "/metrics/?name[]=x")
    reading = drain(parse_reading(page, taken_at_s=1.0))
    assert reading is not None
    assert (reading.running, reading.waiting, reading.kv_tokens) == (0, 0, 16_000_000)
    assert is_filtered(page)
    assert json.loads(answered(replica, "/v1/models"))["data"][0]["id"] == "mock"
    assert answered(replica, "/health") == b""
    assert json.loads(answered(replica, "/v1/chat/completions", b"{}"))["usage"]["completion_tokens"] == 8


@needs_compiler
def test_prompts_that_begin_alike_have_tokens_that_begin_alike(replica: int) -> None:
    one, other = (
        json.loads(answered(replica, "/v1/chat/completions/render", b"same " * 20 + end))["token_ids"]
        for end in (b"this", b"that")
    )
    assert one[:25] == other[:25]
    assert one[25:] != other[25:]


@needs_compiler
@pytest.mark.parametrize(
    "case", [SSE, replace(SSE, chunks=0), replace(SSE, chunks=0, rate=500.0), replace(SSE, gap_us=0)]
)
def test_the_load_generator_counts_what_a_replica_sends(
    case: Case, programs: Path, replica: int, tmp_path: Path
) -> None:
    case = replace(case, ramp_s=0.0, warmup_s=0.0)
    (begin, end, line), _ = loaded(programs, case, replica, case.requests(tmp_path))
    assert (begin, end) == ("begin", "end")
    seen = Window.parse(line, Books(None, 0.0, 0.0, 0.0, 0.0, 0.0), cores=1, realtime=False)
    assert seen.failures == {}
    assert seen.requests > 0
    assert (seen.chunks > 0) == bool(case.chunks)
    assert (seen.transit is not None) == bool(case.chunks)


@needs_compiler
def test_the_load_generator_counts_refusals(programs: Path, replica: int, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.http"
    wrong.write_bytes(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    case = replace(SSE, clients=1, chunks=0, ramp_s=0.0, warmup_s=0.0)
    lines, complaint = loaded(programs, case, replica, [wrong])
    assert json.loads(lines[2])["failures"]["status"] > 0
    assert "404 Not Found" in complaint


@needs_compiler
def test_a_stream_that_ends_early_is_a_failure(programs: Path, replica: int, tmp_path: Path) -> None:
    short = tmp_path / "short.http"
    ask = b'{"model":"mock","messages":[],"stream":true,"max_tokens":3}'
    short.write_bytes(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(ask), ask))
    case = replace(SSE, clients=1, chunks=10_000, ramp_s=0.0, warmup_s=0.0)
    lines, _ = loaded(programs, case, replica, [short])
    assert list(json.loads(lines[2])["failures"]) == ["chunks missing"]
