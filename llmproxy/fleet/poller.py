"""The side window: one task per backend asks for its health, its models and its load, and hands on what it hears.

It never meets a request. A lap is a fixed walk (health, then models, then metrics; the first two only when due) that
ends with exactly one verdict: `answered`, or `troubled` by the first step that failed. Metrics that cannot be read are
no verdict: numbers go stale by themselves, and who is well is told by `/health`, which is then asked once more.
A backend at work is read several times a second; one without work says the same each time, and is read with its health.
"""

from __future__ import annotations

import asyncio
import errno
import random
import ssl
import traceback
import zlib
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import Enum
from math import inf
from typing import Protocol, TypeVar
from urllib.parse import quote

import structlog

from llmproxy.core.domain import Reading, Trouble
from llmproxy.fleet.engine_config import SERVER_INFO_PATH, parse_sequences
from llmproxy.fleet.events import BackendObserver
from llmproxy.fleet.metrics_text import METRIC_NAMES, is_filtered, parse_reading
from llmproxy.fleet.models import parse_listing
from llmproxy.lifecycle.descriptors import lack_of
from llmproxy.upstream.port import ConnectFailed, InvalidResponse, Upstream, UpstreamBroken, read_body

BODY_BYTES_MAX = 4 << 20
"""No answer is read beyond this: a page of vLLM is 0.1 MB, 8,000 adapters are listed in 4, and a wrong URL may lead to
anything. What is read is read in slices, and no step of it holds the loop for more than about 10 ms."""

FAST_BYTES_MAX = 32 << 10
"""A filtered answer above this is no longer cheap for the engine: it is asked for at the pace of the full page."""

HEALTH_INTERVAL_S = 1.0
REPROBE_INTERVAL_S = 10.0
"""How often a better source of readings is looked for: a backend may be replaced without ever refusing a poll."""

LIMIT_ASKS_MAX = 3
"""How often the configuration is asked for where no answer comes: vLLM looks its machine over before the first."""
LIMIT_PAUSE_S = 10.0
"""Between two such questions, and between two lives of a backend that are worth one each."""

GZIP_OR_ZLIB = 32
"""Added to the window size, it lets zlib recognize either header."""

NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL calls an answer that is no TLS."""

FILTERED_PATH = "/metrics/?" + "&".join(f"name[]={quote(name, safe=':')}" for name in METRIC_NAMES)
# The slash matters: without it vLLM serves another handler, which ignores the filter and costs the engine twenty times
# as much of its event loop.

T = TypeVar("T")

_log = structlog.get_logger()


class Pace(Protocol):
    """How often and how patiently to ask, in seconds; the `poll` section of the configuration has this shape."""

    @property
    def interval_s(self) -> float:
        """Between readings where the filtered metrics page answers."""

    @property
    def page_interval_s(self) -> float:
        """Between readings where only the full page answers."""

    @property
    def models_interval_s(self) -> float:
        """Between two listings."""

    @property
    def timeout_s(self) -> float:
        """For each single question, from connecting to the last byte."""


class _Source(Enum):
    """Where readings come from, best first; its value is the path, None where there are none to be had."""

    FILTERED = FILTERED_PATH
    PAGE = "/metrics"
    NOWHERE = None


class _LapFailed(Exception):  # noqa: N818 - an answer of the backend, not an error of this code
    def __init__(self, trouble: Trouble, detail: str) -> None:
        super().__init__(detail)
        self.trouble = trouble
        self.detail = detail


class Poller:
    """Polls one backend for as long as `run` runs.

    `url` is the backend's base URL without a trailing slash, `api_key` its bearer key or None. `has_work` says whether
    requests are in flight there. `clock` gives the time stamps of readings in seconds: it is the scheduler's clock, and
    the event loop's unless given.
    """

    def __init__(
        self,
        backend: str,
        url: str,
        api_key: str | None,
        upstream: Upstream,
        events: BackendObserver,
        pace: Pace,
        *,
        has_work: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._backend = backend
        self._url = url
        # A compressed answer would be paid for on the engine's event loop.
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._has_key = bool(api_key)
        self._upstream = upstream
        self._events = events
        self._pace = pace
        self._has_work = has_work
        self._clock = clock or asyncio.get_running_loop().time
        self._rng = rng or random.Random()
        self._bug: str | None = None
        self._began = asyncio.Event()
        self._listed_at_s = -inf
        self._start_afresh()

    async def run(self) -> None:
        """Poll until cancelled. No answer and no bug of ours ends it."""
        asking = asyncio.create_task(self._follow_limit(), name=f"limit of {self._backend}")
        try:
            while True:
                try:
                    pause_s = await self.lap()
                except Exception as bug:  # noqa: BLE001 - the fleet must stay visible whatever one answer does to us
                    self._report(bug)
                    pause_s = self._pace.page_interval_s
                await self._rest(pause_s)
        finally:
            asking.cancel()

    async def list_now(self) -> None:
        """Report the backend's models at once, for one who changed them; laps go on beside this.

        No answer is no news: that is left to the next lap.
        """
        with suppress(_LapFailed):
            await self._ask_models()

    async def _follow_limit(self) -> None:
        """Ask for the batch limit once in each life of the backend, beside the laps: the answer may take seconds."""
        while True:
            await self._began.wait()
            self._began.clear()
            for _ in range(LIMIT_ASKS_MAX):
                try:
                    status, body = await self._get(SERVER_INFO_PATH)
                except _LapFailed:
                    await asyncio.sleep(LIMIT_PAUSE_S)
                    continue
                if status == 200 and (limit := parse_sequences(body)) is not None:
                    self._events.published(self._backend, limit)
                break
            await asyncio.sleep(LIMIT_PAUSE_S)

    # --- one lap -------------------------------------------------------------------------------------------------

    async def lap(self) -> float:
        """Ask what is due, report it, and return the seconds to wait before the next lap."""
        try:
            await self._walk()
        except _LapFailed as failure:
            self._start_afresh()
            self._events.troubled(self._backend, failure.trouble, failure.detail)
            # Refusing costs a machine nothing, and both the repetition and the end of it are news worth having soon.
            soon = failure.trouble is Trouble.REFUSED
            return self._jittered(self._pace.interval_s if soon else self._pace.page_interval_s)
        return max(0.0, min(self._health_due_s, self._models_due_s, self._metrics_due_s) - self._clock())

    async def _rest(self, pause_s: float) -> None:
        """Wait for the next lap; it comes sooner where a backend that was idle is given work."""
        if not self._idle:
            await asyncio.sleep(pause_s)
            return
        end_s = self._clock() + pause_s
        while (left_s := end_s - self._clock()) > 0.0:
            await asyncio.sleep(min(left_s, self._pace.interval_s))
            # To look costs a tenth of what asking does.
            if self._has_work():
                self._metrics_due_s = -inf
                return

    def _start_afresh(self) -> None:
        """Forget what was learned of a backend that failed: what comes back may be another server."""
        self._source: _Source | None = None
        self._idle = self._well = False
        self._health_due_s = self._models_due_s = self._metrics_due_s = self._probe_due_s = -inf

    def _jittered(self, interval_s: float) -> float:
        # Pollers of many backends, and of many proxies, must not fall into step; an interval is the most it may take.
        return interval_s * self._rng.uniform(0.8, 1.0)

    async def _walk(self) -> None:
        """Ask what is due. Each next time counts from the answer, so that a slow server is not asked ever faster."""
        if self._clock() >= self._health_due_s:
            await self._ask_health()
            self._health_due_s = self._clock() + self._jittered(HEALTH_INTERVAL_S)
        if self._clock() >= self._models_due_s:
            await self._ask_models()
            self._models_due_s = self._clock() + self._jittered(self._pace.models_interval_s)
        if self._clock() >= self._metrics_due_s:
            await self._read_load()
        self._events.answered(self._backend)
        if not self._well:
            self._well = True
            self._began.set()

    async def _read_load(self) -> None:
        reading, interval_s = None, self._pace.page_interval_s
        try:
            reading, interval_s = await self._ask_metrics()
        except _LapFailed as failure:
            if failure.trouble is Trouble.REFUSED:
                raise
            self._source = None
            self._events.unread(self._backend, failure.trouble, failure.detail)
            # The last good word of its health is from before this: a machine that is gone hangs just the same.
            await self._ask_health()
            self._health_due_s = self._clock() + self._jittered(HEALTH_INTERVAL_S)
        self._metrics_due_s = self._clock() + self._jittered(interval_s)
        idle = reading is not None and not (reading.running or reading.waiting or self._has_work())
        self._idle = idle and interval_s < HEALTH_INTERVAL_S
        if self._idle:
            self._metrics_due_s = max(self._metrics_due_s, self._health_due_s)
        if reading is not None:
            self._events.observe(self._backend, reading)

    async def _ask_health(self) -> None:
        # A server without this route cannot be called ill for it: only its 5xx is a statement about its health.
        status, _ = await self._get("/health")
        if status >= 500:
            raise _LapFailed(Trouble.UNHEALTHY, f"GET {self._url}/health answered {status}")

    async def _ask_models(self) -> None:
        sent_at_s = self._clock()
        status, body = await self._get("/v1/models")
        if status != 200:
            trouble = Trouble.UNHEALTHY if status >= 500 else Trouble.GARBAGE
            asks = "; is the backend's api_key right?" if self._has_key else "; set backend_api_key, or its own api_key"
            hint = asks if status in (401, 403) else "; does it speak TLS (https://)?" if status == 400 else ""
            raise _LapFailed(trouble, f"GET {self._url}/v1/models answered {status}{hint}")
        try:
            listing = await _in_slices(parse_listing(body, sent_at_s))
        except ValueError as error:
            raise _LapFailed(Trouble.GARBAGE, f"GET {self._url}/v1/models: {error}") from None
        # The answer to an earlier question may come later; it must not undo what is known.
        if sent_at_s >= self._listed_at_s:
            self._listed_at_s = sent_at_s
            self._events.listed(self._backend, listing)

    async def _ask_metrics(self) -> tuple[Reading | None, float]:
        """The reading of the best source that gives one, beginning with the last that did, and when to ask again."""
        sources = list(_Source)
        if self._source is not None and self._clock() < self._probe_due_s:
            sources = sources[sources.index(self._source) :]
        else:
            self._probe_due_s = self._clock() + REPROBE_INTERVAL_S
        for self._source in sources:
            if self._source.value is None:
                break
            sent_at_s = self._clock()
            status, body = await self._get(self._source.value)
            try:
                reading = await _in_slices(parse_reading(body, sent_at_s)) if status == 200 else None
            except ValueError as error:
                raise _LapFailed(Trouble.GARBAGE, f"GET {self._url}/metrics: {error}") from None
            if reading is None:
                continue
            if self._source is _Source.PAGE:
                return reading, self._pace.page_interval_s
            if len(body) <= FAST_BYTES_MAX:
                return reading, self._pace.interval_s
            if is_filtered(body):
                return reading, self._pace.page_interval_s
        return None, self._pace.page_interval_s

    # --- one question --------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body of one answer, redirects not followed. Raises _LapFailed where no readable answer came."""
        what = f"GET {self._url}{path.partition('?')[0]}"
        timeout_s = self._pace.timeout_s
        answers = False
        try:
            async with asyncio.timeout(timeout_s):
                # The time limit for connecting is the one for the whole question.
                exchange = await self._upstream.open(self._url, "GET", path, self._headers, (), 2 * timeout_s)
                answers = True
                body = _decompressed(await read_body(exchange, BODY_BYTES_MAX), exchange.headers)
        except TimeoutError:
            raise _LapFailed(Trouble.TIMEOUT, f"{what}: no answer within {timeout_s:g} s") from None
        except (ConnectFailed, UpstreamBroken, ValueError, zlib.error) as error:
            # The client names the backend, and the question does so already.
            why = str(error.__cause__ or error).removeprefix(f"{self._url}: ")
            if answers or isinstance(error, InvalidResponse | ValueError):
                raise _LapFailed(Trouble.GARBAGE, f"{what}: {why}") from None
            # A backend that answered before has the right address.
            hint = _hint(error) if self._listed_at_s == -inf else ""
            raise _LapFailed(_trouble(error), f"{what}: {why}{hint}") from None
        if len(body) > BODY_BYTES_MAX:
            raise _LapFailed(Trouble.GARBAGE, f"{what}: the answer is larger than {BODY_BYTES_MAX} bytes")
        return exchange.status, body

    def _report(self, bug: Exception) -> None:
        # A bug repeats with every lap; its story is told again only when it is another story.
        where = traceback.extract_tb(bug.__traceback__)[-1]
        story = f"{type(bug).__name__} at {where.filename}:{where.lineno}"
        if story != self._bug:
            self._bug = story
            _log.error("poller_bug", backend=self._backend, exc_info=bug)


async def _in_slices(slices: Generator[None, None, T]) -> T:
    """The result of a computation that pauses now and then; everybody else on the loop has a turn in each pause."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


def _decompressed(body: bytes, headers: list[tuple[str, str]]) -> bytes:
    """The body without the gzip or deflate coding that a server applied unasked. At most one byte too many is unpacked.

    Raises zlib.error.
    """
    coding = next((value for name, value in headers if name.lower() == "content-encoding"), "")
    if coding.strip().lower() not in ("gzip", "deflate"):
        return body
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | GZIP_OR_ZLIB).decompress(body, BODY_BYTES_MAX + 1)


def _hint(error: Exception) -> str:
    """What may be wrong with the URL of a backend that never answered."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError):
        return "; it does not speak TLS: should its URL begin with http://?" if cause.reason in NO_TLS else ""
    if isinstance(error, UpstreamBroken):
        return "; if it speaks TLS, its URL should begin with https://"
    return "; nothing listens there (yet): is the address right?" if _is_refused(cause) else ""


def _trouble(error: Exception) -> Trouble:
    cause = error.__cause__
    if isinstance(cause, OSError) and lack_of(cause) is not None:
        return Trouble.LOCAL_FAILURE
    # Only a refusal proves that no process listens, and open streams are given up on that proof: a name that does not
    # resolve, or an unreachable network, must never be mistaken for it.
    return Trouble.REFUSED if _is_refused(cause) else Trouble.TIMEOUT


def _is_refused(cause: BaseException | None) -> bool:
    return isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED
