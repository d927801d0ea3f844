"""Asks servers for their engine, models and limits, as the proxy would, and finds settings that cost speed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Generator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import orjson
from msgspec import Struct, field

from llmproxy.backends.engine_config import SEQUENCES_MAX, SERVER_INFO_PATH, parse_sequences
from llmproxy.backends.metrics_text import parse_reading
from llmproxy.backends.models import parse_listing
from llmproxy.backends.poller import BODY_BYTES_MAX, hint_of
from llmproxy.config import BackendConfig
from llmproxy.config.value_types import integer_of
from llmproxy.core.backends.batch_limit import UNPUBLISHED
from llmproxy.core.domain import ModelCard
from llmproxy.tools.terminal import printable
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.port import ConnectFailed, Upstream, UpstreamBroken, read_response_body
from llmproxy.upstream.tls import peers_tls

TIMEOUT_S = 5.0  # The time limit of each request to a server.
NO_KEY = (401, 403)  # The status without a key, or with a wrong one.
BATCH_SMALL = 16
"""A batch limit below this is reported. It leaves most of a GPU idle: the step time hardly depends on a small batch."""
CLOCK_S = 5.0
"""A larger difference of clocks is reported, because it makes the logs of proxy and engine hard to compare.

HTTP dates have whole seconds.
"""
WAIT = "Wait until the engine is up, or restart it."
VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"
OWNERS = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP}  # The field `owned_by` of a model -> the engine.
PROPS_PATH = "/props"  # The configuration of llama.cpp.
METRICS_ON = {
    VLLM: "Start vLLM without --disable-log-stats.",
    SGLANG: "Start SGLang with --enable-metrics.",
    LLAMA_CPP: "The metrics of llama.cpp are not read: the proxy counts its own requests.",
}
"""Engine -> advice if its metrics cannot be read."""
SHUTDOWN_SINCE = (0, 18)  # The first version of vLLM that has --shutdown-timeout.
RANK = re.compile(rb'^vllm:num_requests_running\{[^}\n]*?engine="(\d+)"', re.MULTILINE)
PREFIX_CACHING = re.compile(rb'^vllm:cache_config_info\{[^\n]*?enable_prefix_caching="(\w+)"', re.MULTILINE)
OPENSSL = re.compile(r"\[SSL\b[^]]*\] | \(_ssl\.c:\d+\)")  # The parts of OpenSSL's messages that say nothing to people.
ENDS_AT_ONCE = re.compile(rb'"shutdown_timeout":\s*0\s*[,}]')

T = TypeVar("T")


class Problem(Struct, frozen=True):
    """A finding about a replica or about the fleet, with a remedy."""

    # Whether requests would fail. Any other finding costs speed, or hides something from the proxy.
    fatal: bool
    text: str
    remedy: str


class Replica(Struct):
    """The answers of one server, and the problems that they show."""

    backend: BackendConfig
    engine: str = ""
    version: str = ""
    models: list[ModelCard] = []
    # How many requests the server runs at once; None if it does not publish the number.
    batch_limit: int | None = None
    # Whether the proxy can read its load, and learn its batch limit from that.
    has_load: bool = False
    # How many tokens its KV cache holds; None if unknown.
    kv_tokens: int | None = None
    # The number of data-parallel engines behind the URL.
    ranks: int = 1
    problems: list[Problem] = field(default_factory=list)
    # The status of /v1/models; 0 without an answer.
    status: int = 0

    @property
    def foreign(self) -> str:
        """Returns why it may belong to others: it answered, but not like an engine. Empty for all other servers."""
        if self.engine or not 0 < self.status < 500:
            return ""
        if self.status in NO_KEY:
            return f"it wants an API key (/v1/models answers {self.status}); repeat init with --api-key KEY --force"
        fatal = (f"{problem.text}. {problem.remedy}" for problem in self.problems if problem.fatal)
        return next(fatal, "it lists models, but not like vLLM, SGLang or llama.cpp; if it is yours, give its URL too")

    @property
    def usable(self) -> bool:
        """Whether no problem is fatal."""
        return not any(problem.fatal for problem in self.problems)

    def note(self, text: str, remedy: str, *, fatal: bool = False) -> None:
        """Adds a problem."""
        self.problems.append(Problem(fatal, text, remedy))


class _Answer(Struct):
    status: int
    body: bytes
    # Names in lower case.
    headers: Mapping[str, str]


async def look_at(backends: Collection[BackendConfig], api_key: str | None = None) -> list[Replica]:
    """Asks all servers at once. A failure becomes a problem in the result.

    `api_key` is the key for backends without a configured key. Raises ConfigError for a CA file that cannot be used.
    """
    endpoints = Endpoints()
    # The resolver must not follow the names: it would log failures, which are in the result.
    endpoints.tls.update(peers_tls(backends))
    try:
        async with HttpUpstream(endpoints) as upstream:
            return await asyncio.gather(*(_look(backend, upstream, api_key) for backend in backends))
    finally:
        await endpoints.close()


async def look_at_unnamed(backends: Collection[BackendConfig], api_key: str | None) -> list[Replica]:
    """Examines servers that may be no engines, because nobody named them as backends.

    All are asked without a key first. Only the servers that demand a key are asked again, with `api_key`.
    """
    replicas = await look_at(backends)
    closed = [replica.backend for replica in replicas if replica.status in NO_KEY]
    again = {replica.backend.url: replica for replica in (await look_at(closed, api_key) if api_key else ())}
    return [again.get(replica.backend.url, replica) for replica in replicas]


async def _look(backend: BackendConfig, upstream: Upstream, api_key: str | None) -> Replica:
    replica = Replica(backend)
    key = backend.api_key or api_key
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    paths = ("/v1/models", "/health", "/version", "/metrics", SERVER_INFO_PATH, PROPS_PATH)
    found = await asyncio.gather(*(_get(upstream, backend.url, path, headers) for path in paths))
    models, health, version, metrics, info, props = found
    if isinstance(models, Problem):
        replica.problems.append(models)
        return replica
    replica.status = models.status
    _read_models(replica, models, has_key=bool(key))
    if replica.usable:
        _read_engine(replica, version)
        if isinstance(health, Problem):
            replica.note(f"/health: {health.text}", WAIT, fatal=True)
        elif health.status >= 500:
            replica.note(f"/health answers {health.status}", WAIT, fatal=True)
    if replica.usable:
        replica.batch_limit = _batch_limit(replica, info, props)
        _read_metrics(replica, metrics)
        _read_config(replica, info)
        _compare_clocks(replica, models)
    return replica


async def _get(upstream: Upstream, url: str, path: str, headers: Mapping[str, str]) -> _Answer | Problem:
    """Returns the answer to a GET, or the problem if there is no answer."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            exchange = await upstream.open(url, "GET", path, headers, (), 2 * TIMEOUT_S)
            body = await read_response_body(exchange, BODY_BYTES_MAX)
    except TimeoutError:
        return Problem(True, f"no answer within {TIMEOUT_S:g} s", "Start the engine, or correct host and port.")
    except (ConnectFailed, UpstreamBroken, ValueError) as error:
        text = OPENSSL.sub("", str(error).removeprefix(f"{url}: "))
        hint = hint_of(error).lstrip("; ") or "is this the address of an engine?"
        return Problem(True, printable(text), hint[0].upper() + hint[1:])
    if len(body) > BODY_BYTES_MAX:
        text = f"{path.partition('?')[0]} answers with more than {BODY_BYTES_MAX >> 20} MB"
        return Problem(True, text, "Is this the address of an engine?")
    return _Answer(exchange.status, body, {name.lower(): value for name, value in exchange.headers})


def _read_models(replica: Replica, answer: _Answer, *, has_key: bool) -> None:
    if answer.status in NO_KEY:
        remedy = "Correct LLMPROXY_BACKEND_API_KEY, or its api_key." if has_key else "Set LLMPROXY_BACKEND_API_KEY."
        replica.note(f"/v1/models answers {answer.status}: it wants an API key", remedy, fatal=True)
        return
    address = "Give the address of the engine itself, without /v1, and with its path if it has one."
    if answer.status != 200:
        server = printable(answer.headers.get("server", ""))
        replica.note(
            f"/v1/models answers {answer.status}" + (f" (server: {server})" if server else ""),
            WAIT if answer.status >= 500 else address,
            fatal=True,
        )
        return
    try:
        replica.models = list(_whole(parse_listing(answer.body, 0.0)).cards)
    except ValueError as error:
        replica.note(f"/v1/models: {printable(str(error))}", address, fatal=True)
        return
    if all(card.parent is not None for card in replica.models):
        replica.note("/v1/models lists no base model", "Wait until the engine has loaded its model.", fatal=True)


def _read_engine(replica: Replica, version: _Answer | Problem) -> None:
    replica.engine = next((OWNERS[owner] for card in replica.models if (owner := _owner(card)) in OWNERS), "")
    if isinstance(version, Problem) or version.status != 200:
        return
    replica.version = str(_object(version.body).get("version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", replica.version)
    if replica.engine == VLLM and numbers and (int(numbers[1]), int(numbers[2])) < SHUTDOWN_SINCE:
        since = ".".join(map(str, SHUTDOWN_SINCE))
        replica.note(f"vLLM before {since} ends its streams when it is stopped", "Upgrade, or drain it before a stop.")


def _owner(card: ModelCard) -> str:
    return str(card.fields.get("owned_by", "")).lower()


def _read_metrics(replica: Replica, answer: _Answer | Problem) -> None:
    reading = None
    if not isinstance(answer, Problem) and answer.status == 200:
        try:
            reading = _whole(parse_reading(answer.body, 0.0))
        except ValueError as error:
            replica.note(f"/metrics: {printable(str(error))}", "Its load is unknown to the proxy.")
            return
    if isinstance(answer, Problem) or reading is None:
        found = "has no load of vLLM or SGLang"
        remedy = METRICS_ON.get(replica.engine, "The proxy counts its own requests.")
        if isinstance(answer, Problem) or answer.status != 200:
            found = f"gives {answer.text}" if isinstance(answer, Problem) else f"answers {answer.status}"
            # vLLM has this path with every option, so something else refuses it.
            remedy = "The proxy must be able to read it." if replica.engine == VLLM else remedy
        if replica.batch_limit is None and replica.backend.max_in_flight is None:
            remedy += f" Up to {UNPUBLISHED} requests are sent to it at once: set its max_in_flight."
        replica.note(f"its load is unknown: /metrics {found}", remedy)
        return
    replica.has_load = True
    replica.kv_tokens = reading.kv_tokens
    replica.ranks = max(1, len(set(RANK.findall(answer.body))))
    if b"False" in PREFIX_CACHING.findall(answer.body):
        replica.note("prefix caching is off", "Start vLLM without --no-enable-prefix-caching.")


def _batch_limit(replica: Replica, info: _Answer | Problem, props: _Answer | Problem) -> int | None:
    answer = props if replica.engine == LLAMA_CPP else info
    if isinstance(answer, Problem) or answer.status != 200:
        return None
    if replica.engine != LLAMA_CPP:
        return parse_sequences(answer.body)
    slots = integer_of(_object(answer.body).get("total_slots"))
    return slots if slots is not None and 0 < slots <= SEQUENCES_MAX else None


def _read_config(replica: Replica, answer: _Answer | Problem) -> None:
    if isinstance(answer, Problem) or answer.status != 200:
        return
    if replica.batch_limit is not None and replica.batch_limit < BATCH_SMALL * replica.ranks:
        each = replica.batch_limit // replica.ranks
        replica.note(f"it runs {each} requests at once", "Raise --max-num-seqs, if the KV cache has room for more.")
    if ENDS_AT_ONCE.search(answer.body):
        replica.note("its streams end when it is stopped", "Start vLLM with --shutdown-timeout, such as 300.")


def _compare_clocks(replica: Replica, answer: _Answer) -> None:
    try:
        sent = parsedate_to_datetime(answer.headers.get("date", ""))
        ahead_s = (sent - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return
    if abs(ahead_s) > CLOCK_S:
        replica.note(
            f"its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}",
            "Run NTP on both machines, so that times in the logs can be compared.",
        )


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _whole(slices: Generator[None, None, T]) -> T:
    """Runs a sliced computation to its end and returns its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            found: T = end.value
            return found
