"""The demo as a process: it serves, and however it ends, it leaves none of its processes behind."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import IO
from urllib.error import URLError

import pytest

from llmproxy.demo import ADAPTERS, MODEL, DemoError, _Children, _sums

PATIENCE_S = 40.0


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    with process:
        try:
            yield process, process.stdout
        finally:
            process.kill()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


def wait_until_refused(url: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            get(f"{url}/health")
        except (URLError, ConnectionError):
            return
        time.sleep(0.05)
    pytest.fail(f"{url} still answers")


def test_a_child_of_the_demo_ends_when_its_standard_input_does() -> None:
    with command("llmproxy.child", "replica", "--port", "0", "--profile", "tiny") as (child, output):
        url = re.search(r"http://\S+", output.readline())
        assert url
        get(f"{url[0]}/health")
        assert child.stdin
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_demo_leaves_nothing_behind(number: signal.Signals) -> None:
    with command("llmproxy", "demo", "--port", "0", "--replicas", "2") as (demo, output):
        guide = ""
        while "Ctrl-C ends everything" not in guide:
            line = output.readline()
            assert line, guide
            guide += line
        base = re.search(r"curl (http://[\d.:]+)", guide)
        replicas = re.search(r"replicas: (\S+) (\S+)", guide)
        assert base
        assert replicas
        served = json.loads(get(f"{base[1]}/v1/models"))
        assert {card["id"] for card in served["data"]} == {MODEL, *ADAPTERS}
        demo.send_signal(number)
        rest = output.read()
        assert demo.wait(PATIENCE_S) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert "Traceback" not in rest
        for url in (base[1], *replicas.groups()):
            wait_until_refused(url)


async def test_a_child_that_dies_ends_the_demo_with_its_last_words() -> None:
    async with _Children() as children:
        await children.start("replica-1", "replica", "--profile", "none")
        with pytest.raises(DemoError, match=r"replica-1 ended with exit code 2; its last words:\n.* no engine profile"):
            await children.printed_url("replica-1")


def test_numbers_of_the_metrics_page_are_summed_by_label() -> None:
    page = (
        '# TYPE a_total counter\na_total{x="1",y="1"} 2\na_total{x="1",y="2"} 3\na_total{x="2",y="1"} 4\nb{x="1"} 9\n'
    )
    assert _sums(page, "a_total", "x") == {"1": 5.0, "2": 4.0}
