"""Requests by the engine's OpenAPI document, valid and invalid, sent through a proxy to a simulated replica.

Run by the Python of `.venv-hostile`, which `make hostile` makes, with the path of the `llmproxy` command to test:
schemathesis is no dependency of the project. `engine_openapi.json.gz` is vLLM 0.32.0's own document (Apache-2.0), cut
down to the routes that the simulated replica has, without its descriptions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

DOCUMENT = Path(__file__).with_name("engine_openapi.json.gz")
START_S, ANSWER_S = 30.0, 30.0
IDLE = ("llmproxy_in_flight_requests", "llmproxy_queued_requests", "llmproxy_queued_bytes")


@contextmanager
def started(*command: str, ready: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + START_S
        while not _is_200(ready):
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"{' '.join(command)} did not start")
            time.sleep(0.1)
        yield
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)} has ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait(20)


def _is_200(url: str) -> bool:
    try:
        return bool(requests.get(url, timeout=2).status_code == 200)
    except requests.RequestException:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def violation(answer: Any) -> str:
    """The violated rule for an answer; "" for a success or a proper error of the route."""
    if answer.status_code < 400:
        return ""
    if answer.status_code >= 500:
        return f"status {answer.status_code}: {answer.text[:500]}"
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"an error in a form that clients do not know: {answer.text[:500]}"
    return "" if isinstance(message, str) and message else "an error that says nothing"


def left_over(url: str) -> str:
    """The requests, leases and bytes that the proxy still has a while after the last answer."""
    until_s = time.monotonic() + 10
    while True:
        lines = requests.get(url + "/metrics", timeout=5).text.splitlines()
        held = [line for line in lines if line.startswith(IDLE) and float(line.rsplit(" ", 1)[1])]
        if not held or time.monotonic() > until_s:
            return "; ".join(held)
        time.sleep(0.2)


def examine(operation: Any, url: str, examples: int, seeded: int) -> tuple[int, str]:
    """How many requests of one route were tried, and the description of a failure."""
    tried = 0

    def check(case: Any) -> None:
        nonlocal tried
        tried += 1
        wrong = violation(case.call(base_url=url, timeout=ANSWER_S))
        assert not wrong, f"{operation.path}: {case.body!r}: {wrong}"

    healthy = list(HealthCheck)
    limits = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=healthy,
                      phases=[Phase.generate])  # fmt: skip
    try:
        seed(seeded)(limits(given(case=operation.as_strategy())(check)))()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return tried, f"  {error}"
    return tried, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llmproxy", help="The command.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, default=25, help="Of each route.")
    args = parser.parse_args()
    schema = schemathesis.openapi.from_dict(json.loads(gzip.decompress(DOCUMENT.read_bytes())))
    began_s = time.monotonic()
    replica_port, port = free_port(), free_port()
    replica, proxy = f"http://127.0.0.1:{replica_port}", f"http://127.0.0.1:{port}"
    serve = (args.llmproxy, "serve", "--host", "127.0.0.1", "--port", str(port), "--backend", replica)
    with (
        started(args.llmproxy, "replica", "--port", str(replica_port), "--model", "base", ready=replica + "/health"),
        started(*serve, ready=proxy + "/ready"),
    ):
        results = [examine(each.ok(), proxy, args.examples, args.seed) for each in schema.get_all_operations()]
        held = left_over(proxy)
    findings = [finding for _, finding in results if finding] + [f"  left over: {held}"] * bool(held)
    cases = sum(count for count, _ in results)
    print(f"the engine's OpenAPI document: {cases} cases, {len(findings)} findings, {time.monotonic() - began_s:.0f} s")
    print("".join(finding + "\n" for finding in findings), end="")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
