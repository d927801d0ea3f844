"""Alerts about faults that the demo does not play: the last part of `make monitoring`, about two minutes.

The faults: a limit on the bytes of a file, as on a full disk; a killed worker (of two); a replica that becomes slower
each second; a KV cache filled by requests past the proxy; the end of the replica. Each alert must be silent before its
fault and fire after it. The minutes of its rule are seconds here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

from tests.tools.export.beside import free_port, read_by, running, until_it_answers
from tests.tools.export.scenes import Alert, fires_in, report

CLIENTS = 40
KV_TOKENS = 16_384
"""Enough for twenty of their requests at once."""
FILE_BLOCKS = 64
"""Of 512 or 1,024 bytes, by the shell: some dozens of requests in the log."""
SLOWER = 1.06
"""Factor per second. A running answer then takes longer than its prediction."""


def ask_on(urls: list[str]) -> None:
    """A client that sends requests to the first of `urls` until `urls` is empty."""
    while urls:
        # Every prompt differs, so that prompts share no blocks of the cache.
        text = " ".join(str(random.random()) for _ in range(60))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": random.randint(200, 600), "stream": True}
        with suppress(OSError, HTTPException):
            post(f"{urls[0]}/v1/chat/completions", body)


def post(url: str, body: object) -> None:
    """Raises OSError, HTTPException."""
    with urlopen(Request(url, json.dumps(body).encode(), {"content-type": "application/json"}), timeout=60) as answer:
        answer.read()


class Slow:
    """A fault of a simulated replica: each call makes it slower by `SLOWER`."""

    def __init__(self, replica: str) -> None:
        self._url, self._factor = f"{replica}/sim/fault", 1.0

    def __call__(self) -> None:
        self._factor *= SLOWER
        post(self._url, {"kind": "slow", "factor": self._factor})

    def heal(self) -> None:
        post(self._url, {"kind": None})


def once(act: Callable[[], object]) -> Callable[[], object]:
    """A function whose second and later calls do nothing."""
    acts = [act]
    return lambda: acts.pop()() if acts else None


def main() -> int:
    if shutil.which("prometheus") is None:
        print("skipped: prometheus is not installed (Debian: prometheus)")
        return 0
    port, engine = free_port(), free_port()
    proxy, replica = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{engine}"
    urls = [proxy]
    program = f"exec {sys.executable} -m llmproxy"
    with TemporaryDirectory() as made, ThreadPoolExecutor(CLIENTS) as clients:
        logs = Path(made) / "replica.log", Path(made) / "proxy.log"
        serve = f"{program} serve --host 127.0.0.1 --port {port} --workers 2 --backend {replica} --state-file none"
        serve = f"ulimit -f {FILE_BLOCKS}; {serve} --decision-log {made}/decisions.jsonl"
        simulate = f"{program} replica --port {engine} --kv-tokens {KV_TOKENS}"
        with running(["sh", "-c", simulate], logs[0]), running(["sh", "-c", serve], logs[1]) as served:
            until_it_answers(f"{proxy}/ready", logs[1])
            worker = int(Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()[0])
            slow = Slow(replica)

            def fill() -> None:
                slow.heal()
                urls.insert(0, replica)

            damage: tuple[tuple[str, Callable[[], object], Alert], ...] = (
                ("a full disk", lambda: None, ("LlmproxyLogLost", {})),
                ("a worker is killed", once(lambda: os.kill(worker, signal.SIGKILL)), ("LlmproxyWorkerLost", {})),
                ("a replica becomes slower", slow, ("LlmproxyPredictionsOff", {"time": "tpot"})),
                ("a full cache", once(fill), ("LlmproxyKvPressure", {})),
                ("the proxy ends", once(served.terminate), ("LlmproxyAbsent", {})),
            )
            with read_by(port, Path(made), 1, times=60) as prometheus:
                for _ in range(CLIENTS):
                    clients.submit(ask_on, urls)
                try:
                    found = {name: fires_in(name, again, alert, prometheus) for name, again, alert in damage}
                finally:
                    urls.clear()
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
