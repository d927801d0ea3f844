"""Polls the health, models and load of each backend, in one task per backend.

A poll requests health, models and metrics, each if it is due, in this order. A poll ends with exactly one event:
`answered`, or `troubled` after the first failed request. Unreadable metrics are no failure, because old metrics expire;
a request to `/health` then shows whether the backend is healthy. A busy backend with a short metrics page is scraped
several times a second. The load of an idle backend does not change, so its metrics are scraped together with its
health.
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
from typing import TypeVar
from urllib.parse import quote

import structlog

from llmproxy.backends.engine_config import SERVER_INFO_PATH, parse_sequences
from llmproxy.backends.events import BackendObserver
from llmproxy.backends.metrics_text import METRIC_NAMES, is_filtered, parse_reading
from llmproxy.backends.models import parse_listing
from llmproxy.config import PollConfig
from llmproxy.core.domain import Reading, Trouble
from llmproxy.lifecycle.background import supervised
from llmproxy.lifecycle.descriptors import errno_reason
from llmproxy.upstream.port import ConnectFailed, InvalidResponse, Upstream, UpstreamBroken, read_response_body

BODY_BYTES_MAX = 4 << 20
"""The maximum bytes of an answer. A metrics page of vLLM has 0.1 MB, a list of 8,000 adapters 4 MB."""

FAST_BYTES_MAX = 32 << 10
"""A filtered page that is larger costs the engine too much, so it is scraped as rarely as the full page."""

HEALTH_INTERVAL_S = 1.0
REPROBE_INTERVAL_S = 10.0
"""The seconds between two tries to read a better metrics page.

Another server may take the place of a backend without ever refusing a poll.
"""

LIMIT_ASKS_MAX = 3
"""The maximum number of tries to read an engine's configuration. The first answer of vLLM may take seconds."""
LIMIT_PAUSE_S = 10.0
"""The minimum seconds between two tries to read an engine's configuration, even if the backend restarts often."""

GZIP_OR_ZLIB = 32  # Added to the window size of zlib, which then recognizes either header.

NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""OpenSSL's reasons for an answer that is not TLS."""

# Without the slash, vLLM ignores the filter. The full page costs the engine's event loop twenty times as much.
FILTERED_PATH = "/metrics/?" + "&".join(f"name[]={quote(name, safe=':')}" for name in METRIC_NAMES)

T = TypeVar("T")

_log = structlog.get_logger()


class _MetricsSource(Enum):
    """The metrics pages that a poll may read, the best first.

    The value is the path; None for a backend without metrics.
    """

    FILTERED = FILTERED_PATH
    PAGE = "/metrics"
    NOWHERE = None


class _PollFailed(Exception):  # noqa: N818 - an answer of the backend, not an error of this code
    def __init__(self, trouble: Trouble, detail: str) -> None:
        super().__init__(detail)
        self.trouble = trouble
        self.detail = detail


class _PollTimedOut(_PollFailed):
    """A request of a poll got no answer within `poll.timeout_s`."""


class Poller:
    """Polls one backend while `run` runs, and reports to `events`.

    `url` has no trailing slash. `has_work` returns whether requests are in flight on the backend. `clock` is the
    scheduler's clock.
    """

    def __init__(
        self,
        backend: str,
        url: str,
        api_key: str | None,
        upstream: Upstream,
        events: BackendObserver,
        times: PollConfig,
        *,
        has_work: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._backend = backend
        self._url = url
        # Compressing the answer would cost time of the engine's event loop.
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._has_key = bool(api_key)
        self._upstream = upstream
        self._events = events
        self._times = times
        self._has_work = has_work  # Whether requests are in flight on the backend.
        self._clock = clock or asyncio.get_running_loop().time
        self._rng = rng or random.Random()
        self._last_bug: str | None = None
        self._came_up = asyncio.Event()
        self._listed_at_s = -inf
        self._reset()

    async def run(self) -> None:
        """Polls until the task is cancelled, whatever the backend answers."""
        asking = supervised(self._ask_limit, f"limit of {self._backend}")
        try:
            while True:
                try:
                    pause_s = await self.poll_once()
                except Exception as bug:  # noqa: BLE001 - polling goes on, whatever one answer does to this code
                    self._log_bug(bug)
                    pause_s = self._times.page_interval_s
                await self._wait_for_next(pause_s)
        finally:
            asking.cancel()

    async def list_now(self) -> None:
        """Reads the backend's model list now, after a change of adapters, and reports it.

        A failure is left to the next poll.
        """
        with suppress(_PollFailed):
            await self._ask_models()

    async def _ask_limit(self) -> None:
        """Reads the batch limit each time the backend comes up.

        The answer may take seconds, and polls continue meanwhile.
        """
        while True:
            await self._came_up.wait()
            self._came_up.clear()
            for _ in range(LIMIT_ASKS_MAX):
                try:
                    status, body = await self._get(SERVER_INFO_PATH)
                except _PollFailed:
                    await asyncio.sleep(LIMIT_PAUSE_S)
                    continue
                if status == 200 and (limit := parse_sequences(body)) is not None:
                    self._events.published(self._backend, limit)
                break
            await asyncio.sleep(LIMIT_PAUSE_S)

    # --- one poll ------------------------------------------------------------------------------------------------

    async def poll_once(self) -> float:
        """Sends the requests that are due, reports the answers, and returns the seconds until the next poll."""
        try:
            await self._ask_what_is_due()
        except _PollFailed as failure:
            self._reset()
            timed_out = isinstance(failure, _PollTimedOut)
            if timed_out:
                self._events.timed_out(self._backend)
            self._events.troubled(self._backend, failure.trouble, failure.detail)
            # A refused connection is cheap, so the next poll is soon. After a timeout, enough time has passed.
            soon = timed_out or failure.trouble is Trouble.REFUSED
            return self._jittered(self._times.interval_s if soon else self._times.page_interval_s)
        return max(0.0, min(self._health_due_s, self._models_due_s, self._metrics_due_s) - self._clock())

    async def _wait_for_next(self, pause_s: float) -> None:
        """Waits for the next poll, or until an idle backend gets a request."""
        if not self._idle:
            await asyncio.sleep(pause_s)
            return
        end_s = self._clock() + pause_s
        while (left_s := end_s - self._clock()) > 0.0:
            await asyncio.sleep(min(left_s, self._times.interval_s))
            # This check costs a tenth of a poll.
            if self._has_work():
                self._metrics_due_s = -inf
                return

    def _reset(self) -> None:
        """Forgets the state of a failed backend, because another server may come up at its address."""
        self._metrics_source: _MetricsSource | None = None
        self._idle = self._well = False
        self._health_due_s = self._models_due_s = self._metrics_due_s = self._probe_due_s = -inf

    def _jittered(self, interval_s: float) -> float:
        # Spreads the polls of many backends and proxies over time. No interval is longer than configured.
        return interval_s * self._rng.uniform(0.8, 1.0)

    async def _ask_what_is_due(self) -> None:
        """Sends the requests that are due. Raises _PollFailed.

        Intervals begin when the answer comes, so that a slow server gets pauses.
        """
        if self._clock() >= self._health_due_s:
            await self._ask_health()
            self._health_due_s = self._clock() + self._jittered(HEALTH_INTERVAL_S)
        if self._clock() >= self._models_due_s:
            await self._ask_models()
            self._models_due_s = self._clock() + self._jittered(self._times.models_interval_s)
        if self._clock() >= self._metrics_due_s:
            await self._read_load()
        self._events.answered(self._backend)
        if not self._well:
            self._well = True
            self._came_up.set()

    async def _read_load(self) -> None:
        reading, interval_s = None, self._times.page_interval_s
        try:
            reading, interval_s = await self._ask_metrics()
        except _PollFailed as failure:
            if failure.trouble is Trouble.REFUSED:
                raise
            self._metrics_source = None
            if isinstance(failure, _PollTimedOut):
                self._events.timed_out(self._backend)
            self._events.unread(self._backend, failure.trouble, failure.detail)
            # A machine that is gone fails in the same way, and the last answer to `/health` is older than this failure.
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
        # A server without this route counts as healthy. Only a status of 5xx means unhealthy.
        status, _ = await self._get("/health")
        if status >= 500:
            raise _PollFailed(Trouble.UNHEALTHY, f"GET {self._url}/health answered {status}")

    async def _ask_models(self) -> None:
        sent_at_s = self._clock()
        status, body = await self._get("/v1/models")
        if status != 200:
            # Every engine has this route. A server without it serves nothing yet, such as a proxy before an engine.
            trouble = Trouble.UNHEALTHY if status >= 500 or status == 404 else Trouble.GARBAGE
            asks = "; is the backend's api_key right?" if self._has_key else "; set backend_api_key, or its own api_key"
            if status in (401, 403):
                trouble = Trouble.KEY
            hint = asks if trouble is Trouble.KEY else "; does it speak TLS (https://)?" if status == 400 else ""
            raise _PollFailed(trouble, f"GET {self._url}/v1/models answered {status}{hint}")
        try:
            listing = await _in_slices(parse_listing(body, sent_at_s))
        except ValueError as error:
            raise _PollFailed(Trouble.GARBAGE, f"GET {self._url}/v1/models: {error}") from None
        if all(card.parent is not None for card in listing.cards):
            # The previous names stay known, so that requests for them wait.
            raise _PollFailed(Trouble.UNHEALTHY, f"GET {self._url}/v1/models lists no base model")
        # The answer to an earlier request may arrive late.
        if sent_at_s >= self._listed_at_s:
            self._listed_at_s = sent_at_s
            self._events.listed(self._backend, listing)

    async def _ask_metrics(self) -> tuple[Reading | None, float]:
        """Returns the metrics of the engine, and the seconds until the next scrape. Raises _PollFailed.

        The pages of `_MetricsSource` are tried in their order. The metrics are None if no page has any.
        """
        sources = list(_MetricsSource)
        if self._metrics_source is not None and self._clock() < self._probe_due_s:
            sources = sources[sources.index(self._metrics_source) :]
        else:
            self._probe_due_s = self._clock() + REPROBE_INTERVAL_S
        for self._metrics_source in sources:
            if self._metrics_source.value is None:
                break
            sent_at_s = self._clock()
            status, body = await self._get(self._metrics_source.value)
            try:
                reading = await _in_slices(parse_reading(body, sent_at_s)) if status == 200 else None
            except ValueError as error:
                raise _PollFailed(Trouble.GARBAGE, f"GET {self._url}/metrics: {error}") from None
            if reading is None:
                continue
            if self._metrics_source is _MetricsSource.PAGE:
                return reading, self._times.page_interval_s
            if len(body) <= FAST_BYTES_MAX:
                return reading, self._times.interval_s
            if is_filtered(body):
                return reading, self._times.page_interval_s
        return None, self._times.page_interval_s

    # --- one question --------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Returns the status and the body of a response. Redirects are not followed. Raises _PollFailed."""
        what = f"GET {self._url}{path.partition('?')[0]}"
        timeout_s = self._times.timeout_s
        answers = False
        try:
            async with asyncio.timeout(timeout_s):
                # The timeout above includes connecting, so this limit is never reached.
                exchange = await self._upstream.open(self._url, "GET", path, self._headers, (), 2 * timeout_s)
                answers = True
                body = _decompressed(await read_response_body(exchange, BODY_BYTES_MAX), exchange.headers)
        except TimeoutError:
            raise _PollTimedOut(Trouble.TIMEOUT, f"{what}: no answer within {timeout_s:g} s") from None
        except (ConnectFailed, UpstreamBroken, ValueError, zlib.error) as error:
            # The message of the client names the backend, as `what` does.
            why = str(error).removeprefix(f"{self._url}: ")
            if answers or isinstance(error, InvalidResponse | ValueError):
                raise _PollFailed(Trouble.GARBAGE, f"{what}: {why}") from None
            # A backend that answered before has the right address.
            hint = hint_of(error) if self._listed_at_s == -inf else ""
            raise _PollFailed(_trouble(error), f"{what}: {why}{hint}") from None
        if len(body) > BODY_BYTES_MAX:
            raise _PollFailed(Trouble.GARBAGE, f"{what}: the answer is larger than {BODY_BYTES_MAX} bytes")
        return exchange.status, body

    def _log_bug(self, bug: Exception) -> None:
        # A bug repeats with every poll. Only a different bug is logged again.
        where = traceback.extract_tb(bug.__traceback__)[-1]
        description = f"{type(bug).__name__} at {where.filename}:{where.lineno}"
        if description != self._last_bug:
            self._last_bug = description
            _log.error("poller_bug", backend=self._backend, exc_info=bug)


async def _in_slices(slices: Generator[None, None, T]) -> T:
    """Runs a sliced computation and returns its result. Other tasks run between the slices."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


def _decompressed(body: bytes, headers: list[tuple[str, str]]) -> bytes:
    """Returns the body, decompressed to at most BODY_BYTES_MAX + 1 bytes if it is compressed.

    Some servers compress unasked. Raises zlib.error.
    """
    coding = next((value for name, value in headers if name.lower() == "content-encoding"), "")
    if coding.strip().lower() not in ("gzip", "deflate"):
        return body
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | GZIP_OR_ZLIB).decompress(body, BODY_BYTES_MAX + 1)


def hint_of(error: Exception) -> str:
    """Returns a hint that the URL of a backend may be wrong; "" for other errors.

    Used if the backend never listed its models.
    """
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError):
        return "; it does not speak TLS: should its URL begin with http://?" if cause.reason in NO_TLS else ""
    if isinstance(error, UpstreamBroken):
        return "; if it speaks TLS, its URL should begin with https://"
    return "; nothing listens there (yet): is the address right?" if _is_refused(cause) else ""


def _trouble(error: Exception) -> Trouble:
    cause = error.__cause__
    if isinstance(cause, OSError) and errno_reason(cause) is not None:
        return Trouble.LOCAL_FAILURE
    # A refused connection proves that no process listens, and ends open streams. A name that does not resolve, or an
    # unreachable network, proves nothing.
    return Trouble.REFUSED if _is_refused(cause) else Trouble.TIMEOUT


def _is_refused(cause: BaseException | None) -> bool:
    return isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED
