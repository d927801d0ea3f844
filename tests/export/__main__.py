"""The dashboards and rules on a real Prometheus that reads the demo: `make monitoring`, about a minute and a half.

Each query of each panel must have data, but for those in `EMPTY`, and each rule must be evaluated without an error.
"""

from __future__ import annotations

import json
import shutil
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
from urllib.request import urlopen

import yaml

from llmproxy.export import files_of
from llmproxy.export.boards import BOARDS
from tests.export.promql import plain

LASTS_S = 60.0
"""How long the demo is watched; its rates are over 30 s."""
TRIES_S = 30.0
EMPTY = {
    "Blocked": "no usage limit is used up in the demo",
    "Objectives missed": "no objective is configured",
    "Objectives kept": "no objective is configured",
    "Preemptions": "only if a critical request finds all full, which is up to chance",
    "Requests by tenant": "the demo has no tenants with keys",
    "Queue wait by tenant": "the demo has no tenants with keys",
    "Tokens by tenant": "the demo has no tenants with keys",
    "Share by tenant": "the demo has no tenants with keys",
    "Looks at sources of backends": "all backends are configured",
    "Orders to change adapters": "nobody loads an adapter by the proxy",
    "Replicas needed by group": "no groups are configured",
    "Start of replicas": "all replicas are there when the demo begins",
    "Prefill and decode apart": "no replica of the demo has a role",
    "Stages of split requests": "no replica of the demo has a role",
    "Attempts by verdict": "only if an attempt fails in the time that is watched",
    "Failed polls": "only if the replica that dies is looked at in the time that is watched",
}
"""Panels that may be without data, and why."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    """A process that is ended with the block, and killed where it does not end."""
    with log.open("wb") as out, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def asked(url: str, **query: str) -> Any:
    """The JSON that `url` answers."""
    with urlopen(f"{url}?{urlencode(query)}", timeout=10) as response:
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


def without_data(prometheus: str) -> dict[str, list[str]]:
    """Panel -> its queries that have no data now."""
    empty: dict[str, list[str]] = {}
    for board in BOARDS:
        for panel in board.panels:
            for expression, _ in panel.queries:
                query = plain(expression.replace("$__rate_interval", "30s"))
                found = asked(f"{prometheus}/api/v1/query", query=query)["data"]["result"]
                if not found:
                    empty.setdefault(panel.title, []).append(query)
    return empty


def unhealthy(prometheus: str) -> list[str]:
    groups = asked(f"{prometheus}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return [f"{rule['name']}: {rule.get('lastError', rule['health'])}" for rule in rules if rule["health"] != "ok"]


def main() -> int:
    if shutil.which("prometheus") is None:
        print("skipped: prometheus is not installed (Debian: prometheus)")
        return 0
    with TemporaryDirectory() as made:
        folder = Path(made)
        proxy, prometheus = free_port(), free_port()
        for kind in ("alerts", "prometheus"):
            for name, text in files_of(kind).items():
                (folder / name).write_text(text)
        config = yaml.safe_load((folder / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{proxy}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        logs = folder / "demo.log", folder / "prometheus.log"
        reads = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address=127.0.0.1:{prometheus}"]  # fmt: skip
        url = f"http://127.0.0.1:{prometheus}"
        with (
            running([sys.executable, "-m", "llmproxy", "demo", "--port", str(proxy)], logs[0]),
            running(reads, logs[1]),
        ):
            until_it_answers(f"http://127.0.0.1:{proxy}/health", logs[0])
            until_it_answers(f"{url}/-/ready", logs[1])
            time.sleep(LASTS_S)
            empty, sick = without_data(url), unhealthy(url)
            alerts = asked(f"{url}/api/v1/alerts")["data"]["alerts"]
    count = sum(len(board.panels) for board in BOARDS)
    wrong = {title: queries for title, queries in empty.items() if title not in EMPTY}
    print(f"{count - len(empty)} of {count} panels have data.")
    for title in empty.keys() & EMPTY.keys():
        print(f"  without data: {title} ({EMPTY[title]})")
    for title, queries in wrong.items():
        print(f"WRONG: {title} has no data:", *queries, sep="\n    ")
    for problem in sick:
        print(f"WRONG: rule {problem}")
    print("Alerts:", ", ".join(sorted({f"{one['labels']['alertname']} {one['state']}" for one in alerts})) or "none")
    return 1 if wrong or sick else 0


if __name__ == "__main__":
    sys.exit(main())
