"""A real Prometheus that reads the demo, with the files of `llmproxy export`."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import yaml

from llmproxy.lab.demo.scenes import ADMIN_KEY
from llmproxy.tools.export import files_of
from llmproxy.tools.export.files import RULES

TRIES_S = 30.0
SECONDS = {"m": 60, "h": 3_600, "d": 86_400}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is terminated after the block, and killed if it does not exit."""
    with log.open("wb") as out, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def asked(url: str, **query: str) -> Any:
    """The JSON at `url`, requested with the key of the demo."""
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    with urlopen(Request(f"{url}?{urlencode(query)}", headers=key), timeout=10) as response:
        return json.load(response)


def until_it_answers(url: str, log: Path) -> None:
    ends = time.monotonic() + TRIES_S
    while True:
        try:
            urlopen(url, timeout=10).close()
        except OSError:
            if time.monotonic() > ends:
                raise RuntimeError(f"{url} does not answer:\n{log.read_text()[-2_000:]}") from None
            time.sleep(0.3)
        else:
            return


def faster(rules: str, times: int) -> str:
    """The rules with all durations divided, so that minutes become seconds."""

    def shorter(found: re.Match[str]) -> str:
        return f"{int(found[2]) * SECONDS[found[3]] // times}s"

    in_ranges = re.sub(r"(?<=\[)()(\d+)([mhd])(?=\])", shorter, rules)
    return re.sub(r"^( +for: )(\d+)([mhd])$", lambda found: found[1] + shorter(found), in_ranges, flags=re.MULTILINE)


def play(proxy: str, scene: str) -> None:
    """Play a scene, beside running ones."""
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    urlopen(Request(f"{proxy}/admin/scenes/{scene}", method="POST", headers=key), timeout=10).close()


def begin(proxy: str, scene: str) -> None:
    """Request a scene until it begins: the proxy listens before the demo accepts scenes."""
    ends = time.monotonic() + TRIES_S
    while not any(
        one["event"] == "scene" and f"name={scene} " in one["text"] for one in asked(f"{proxy}/debug/events")["events"]
    ):
        if time.monotonic() > ends:
            raise RuntimeError(f"the scene {scene} does not begin")
        play(proxy, scene)
        time.sleep(0.5)


@contextmanager
def watched(interval_s: int, times: int = 1) -> Iterator[tuple[str, str]]:
    """The URLs of the demo's proxy and of a Prometheus that scrapes it each `interval_s`, with faster rules."""
    with TemporaryDirectory() as made:
        port, log = free_port(), Path(made) / "demo.log"
        demo = [sys.executable, "-m", "llmproxy", "demo", "--port", str(port)]
        with running(demo, log), read_by(port, Path(made), interval_s, times) as prometheus:
            until_it_answers(f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}", prometheus


@contextmanager
def read_by(proxy: int, folder: Path, interval_s: int, times: int = 1) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the proxy on this port."""
    port = free_port()
    text = files_of("alerts")[RULES]
    (folder / RULES).write_text(faster(text, times) if times > 1 else text)
    job = {"job_name": "llmproxy", "static_configs": [{"targets": [f"127.0.0.1:{proxy}"]}]}
    config = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": [RULES],
        "scrape_configs": [job | {"scrape_timeout": f"{interval_s}s"}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    reads = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with running(reads, folder / "prometheus.log"):
        until_it_answers(f"http://127.0.0.1:{port}/-/ready", folder / "prometheus.log")
        yield f"http://127.0.0.1:{port}"
