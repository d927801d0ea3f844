"""Asks a server which engine it runs, with which models and limits, and finds settings that cost speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson
from msgspec import Struct, field
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from llmproxy.backends.engine_config import SERVER_INFO_PATH, parse_sequences
from llmproxy.backends.models import parse_listing
from llmproxy.backends.poller import BODY_BYTES_MAX
from llmproxy.core.domain import ModelCard
from llmproxy.tools.terminal import printable

TIMEOUT_S = 5.0
PLACES_FEW = 16
"""A batch limit below this leaves most of a GPU idle: the step time of a model hardly depends on a small batch."""
CLOCK_S = 5.0
"""Difference of clocks from which logs of proxy and engine are hard to compare. HTTP dates have whole seconds."""
ENGINES: Mapping[str, str] = {"vllm:": "vLLM", "sglang:": "SGLang", "llamacpp:": "llama.cpp"}
"""The prefix of an engine's metrics, and its name."""


class Problem(Struct, frozen=True):
    """A finding about a replica or a fleet."""

    # Whether requests would fail. Other findings cost speed, or hide something.
    fatal: bool
    text: str
    remedy: str


class Replica(Struct):
    """The answers of one server."""

    url: str
    engine: str = ""
    version: str = ""
    models: list[ModelCard] = []
    # Requests that it runs at once; None if it does not say.
    places: int | None = None
    kv_tokens: int | None = None
    prefix_caching: bool | None = None
    # Data-parallel engines behind the URL.
    engines: int = 1
    has_metrics: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return not any(problem.fatal for problem in self.problems)

    def note(self, text: str, remedy: str, *, fatal: bool = False) -> None:
        self.problems.append(Problem(fatal, text, remedy))


class _Answer(Struct):
    status: int
    body: bytes
    headers: Mapping[str, str]


async def look_at(url: str, session: aiohttp.ClientSession, api_key: str | None = None) -> Replica:
    """Asks the server at `url` (no trailing slash) for its health, models, version, configuration and metrics.

    Every failure is a problem of the result. Takes at most `TIMEOUT_S` or a little more.
    """
    replica = Replica(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    paths = ("/v1/models", "/health", "/version", "/metrics", SERVER_INFO_PATH)
    found = await asyncio.gather(*(_get(session, url + path, headers) for path in paths))
    models, health, version, metrics, info = found
    if isinstance(models, str):
        replica.note(models, "Start the engine, or correct host and port.", fatal=True)
        return replica
    _read_models(replica, models, has_key=api_key is not None)
    if not isinstance(health, str) and health.status >= 500:
        replica.note(f"/health answers {health.status}", "Wait until the engine is up, or restart it.", fatal=True)
    if not isinstance(version, str) and version.status == 200:
        replica.version = str(_json(version.body).get("version", ""))
        replica.engine = "vLLM" if replica.version else ""
    _read_metrics(replica, metrics)
    if not isinstance(info, str) and info.status == 200:
        replica.places = parse_sequences(info.body)
    _judge(replica, models)
    return replica


async def _get(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> _Answer | str:
    """Returns the answer to a GET, or why there is none."""
    try:
        async with session.get(
            url, headers=headers, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        ) as answer:
            body = b""
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    return f"answers with more than {BODY_BYTES_MAX >> 20} MB"
            return _Answer(answer.status, body, answer.headers)
    except TimeoutError:
        return f"does not answer within {TIMEOUT_S:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"is not reachable: {printable(str(error) or type(error).__name__)}"


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_models(replica: Replica, answer: _Answer, *, has_key: bool) -> None:
    if answer.status in (401, 403):
        remedy = "Give the right key with --api-key." if has_key else "Give its key with --api-key."
        replica.note(f"/v1/models answers {answer.status}: it wants an API key", remedy, fatal=True)
        return
    if answer.status != 200:
        server = printable(answer.headers.get("Server", ""))
        replica.note(
            f"/v1/models answers {answer.status}" + (f" (server: {server})" if server else ""),
            "Give the address of the engine itself, without /v1, and with its path if it has one.",
            fatal=True,
        )
        return
    slices = parse_listing(answer.body, 0.0)
    try:
        while True:
            next(slices)
    except StopIteration as end:
        replica.models = list(end.value.cards)
    except ValueError as error:
        replica.note(f"/v1/models: {printable(str(error))}", "Give the address of the engine itself.", fatal=True)
        return
    if all(card.parent is not None for card in replica.models):
        replica.note("/v1/models lists no base model", "Wait until the engine has loaded its model.", fatal=True)


def _families(body: bytes) -> Iterator[Metric]:
    """Yields the metric families of a page up to the first line that is no metric."""
    try:
        yield from text_string_to_metric_families(body.decode("utf-8", "replace"))
    except ValueError:
        return


def _read_metrics(replica: Replica, answer: _Answer | str) -> None:
    if isinstance(answer, str) or answer.status != 200:
        return
    engines = set[str]()
    for family in _families(answer.body):
        prefix = family.name[: family.name.find(":") + 1]
        if prefix not in ENGINES:
            continue
        replica.has_metrics = True
        replica.engine = ENGINES[prefix]
        for sample in family.samples:
            engines.add(sample.labels.get("engine", "0"))
            if family.name == "vllm:cache_config_info":
                replica.prefix_caching = sample.labels.get("enable_prefix_caching") == "True"
                tokens = sample.labels.get("kv_cache_size_tokens", "")
                replica.kv_tokens = int(tokens) if tokens.isdigit() else None
    replica.engines = max(1, len(engines))


def _judge(replica: Replica, models: _Answer) -> None:
    """Notes settings that cost speed."""
    if not replica.usable:
        return
    if not replica.has_metrics:
        remedy = {
            "": "The proxy then counts its own requests. It works with any OpenAI-compatible server.",
            "llama.cpp": "Start llama-server with --metrics.",
            "SGLang": "Start SGLang with --enable-metrics.",
        }.get(replica.engine, "Start vLLM without --disable-log-stats.")
        replica.note("its load is unknown: /metrics has no metrics of an engine", remedy)
    if replica.prefix_caching is False:
        replica.note("prefix caching is off", "Start vLLM without --no-enable-prefix-caching.")
    if replica.places is not None and replica.places < PLACES_FEW * replica.engines:
        each = replica.places // replica.engines
        replica.note(f"it runs {each} requests at once", "Raise --max-num-seqs, if the KV cache has room for more.")
    if (sent := models.headers.get("Date")) is not None:
        try:
            ahead_s = parsedate_to_datetime(sent).timestamp() - time.time()
        except ValueError:
            return
        if abs(ahead_s) > CLOCK_S:
            replica.note(
                f"its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}",
                "Run NTP on both machines, so that times in the logs can be compared.",
            )
