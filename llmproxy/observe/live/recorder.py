"""Writes a row of the history each second, from the scheduler's state and the finished requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import nlargest
from itertools import islice
from math import floor
from threading import get_ident

from llmproxy.core.domain import Request, Waited
from llmproxy.core.snapshot import BackendStatus
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.live.events import Events
from llmproxy.observe.live.history import History
from llmproxy.observe.live.minute import KINDS, Minute, quantile
from llmproxy.observe.live.recent import RecentRequests
from llmproxy.scheduling.dispatcher import Dispatcher

BACKENDS_MAX = 64
"""The maximum number of backends with columns in the history. The page shows the current state of more backends."""
FLOWS_MAX = 20
"""How many flows with the most tokens have columns in the history.

As many flows with the longest waits have columns too.
"""
STATES = {"up": 0.0, "starting": 1.0, "drained": 2.0, "leaving": 3.0, "ejected": 4.0, "down": 5.0}
"""The states of a backend as numbers in the history, the worst last."""

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Statuses = Callable[[], Sequence[BackendStatus]]


class Recorder:
    """Collects the data of the live pages. `statuses` returns the status of every backend."""

    def __init__(self, dispatcher: Dispatcher, statuses: Statuses, band_names: Callable[[], Mapping[int, str]]) -> None:
        self.dispatcher = dispatcher
        self.statuses = statuses
        self.band_names = band_names
        self.recent = RecentRequests()
        self.events = Events()
        self.minute = Minute()
        self.history = History(worst=("state",), fleeting=("flow/",))
        self.grants_per_s: dict[int, float] = {}
        self._granted: dict[int, int] = {}
        self._loop, self._thread = asyncio.get_running_loop(), get_ident()

    def heard(self, level: str, name: str, fields: Mapping[str, object]) -> None:
        """Stores a log line as an event. May be called from any thread."""
        note = partial(self.events.note, level, name, dict(fields), self._loop.time())
        if get_ident() == self._thread:
            note()
        else:
            # The pages read the events on the loop. A line after the end of the loop is in the log only.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(note)

    async def run(self) -> None:
        """Writes a row of the history at each full second, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            await asyncio.sleep(floor(now) + 1.0 - now)
            self.tick(loop.time())

    def tick(self, now: float) -> None:
        """Writes the row of the second that ends at `now`. Does nothing if that second has a row."""
        second = round(now) - 1
        if second <= self.history.last_s:
            return
        passed_s = 1 if self.history.last_s < 0 else second - self.history.last_s
        self.minute.roll(second)
        self.history.append(second, self._row(now, passed_s))

    def record(self, ended: RequestExit) -> None:
        self.recent.record(ended)
        self.minute.record(ended)

    def left(self, request: Request, waited: Waited) -> None:
        """Stores why a request waited. The dispatcher calls this when a request leaves the queue without a backend."""
        self.recent.left(request.label, waited, self._loop.time())

    def band(self, level: int) -> str:
        return self.band_names().get(level, str(level))

    def _row(self, now: float, passed_s: int) -> dict[str, float]:
        minute, total = self.minute, self.minute.total
        row = {f"fleet/{kind}_per_s": minute.second.kind(kind) / passed_s for kind in KINDS}
        served = total.backends.values()
        prompt_tokens = sum(backend.prompt for backend in served)
        row["fleet/input_tokens_per_s"] = prompt_tokens / minute.span_s
        row["fleet/output_tokens_per_s"] = sum(backend.output for backend in served) / minute.span_s
        row["fleet/retries_per_s"] = total.retries / minute.span_s
        row["fleet/preemptions_per_s"] = total.preemptions / minute.span_s
        _put_share(row, "fleet/hit_share", sum(backend.cached for backend in served), prompt_tokens)
        _put_share(row, "fleet/ttft_error", total.error_ratio, total.errors)
        self._put_bands(row, passed_s)
        self._put_backends(row, now)
        flows = total.flows
        for band, flow in nlargest(FLOWS_MAX, flows, key=lambda key: flows[key].tokens):
            row[f"flow/{band}/{flow[:200]}/tokens_per_s"] = flows[band, flow].tokens / minute.span_s
        for band, flow in nlargest(FLOWS_MAX, flows, key=lambda key: flows[key].wait_s):
            row[f"flow/{band}/{flow[:200]}/wait_s"] = flows[band, flow].wait_s
        return row

    def _put_bands(self, row: dict[str, float], passed_s: int) -> None:
        total = self.minute.total
        queued, granted = self.dispatcher.pools.queued(), self.dispatcher.granted
        for level in {*self.band_names(), *queued, *granted}:
            band, begin = self.band(level), f"band/{self.band(level)}/"
            before = self._granted.get(level, 0)
            self._granted[level] = granted[level]
            self.grants_per_s[level] = row[begin + "grants_per_s"] = (granted[level] - before) / passed_s
            row[begin + "waiting"] = queued.get(level, (0, 0))[0]
            sums = total.band(band)
            for name, buckets in (("wait", sums.wait_s), ("ttft", sums.ttft_s)):
                for share, at in SHARES.items():
                    value = quantile(buckets, at)
                    if value is not None:
                        row[f"{begin}{name}_{share}_s"] = value
            _put_share(row, begin + "met", sums.met, sums.met + sums.missed)

    def _put_backends(self, row: dict[str, float], now: float) -> None:
        pools, minute = self.dispatcher.pools, self.minute
        for status in islice(self.statuses(), BACKENDS_MAX):
            backend, begin = pools.backends[status.name], f"backend/{status.name[:200]}/"
            view = backend.view(now)
            sums = minute.total.backend(status.name)
            row[begin + "state"] = STATES[status.state]
            row[begin + "saturation"] = view.saturation
            # A replica that is gone produces no tokens, although `sums` still has the tokens of its last minute.
            if status.state == "up" or status.in_flight:
                row[begin + "tokens_per_s"] = sums.output / minute.span_s
            if sums.ttft_s is not None:
                row[begin + "ttft_s"] = sums.ttft_s
            if sums.tpot_s is not None:
                row[begin + "tpot_s"] = sums.tpot_s
            if view.reading is not None:
                row[begin + "kv_used"] = view.kv_used
                row[begin + "waiting"] = view.waiting


def _put_share(row: dict[str, float], name: str, part: float, whole: float) -> None:
    if whole:
        row[name] = part / whole
