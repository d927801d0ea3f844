"""Passes the records of finished requests to their readers in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmproxy.observe.exit import ExitSink, RequestExit
from llmproxy.observe.logs import log_internal

BATCH_S = 0.01  # How long records are collected. A process that is killed loses the records of this time.


class ExitBatch:
    """Collects records for `BATCH_S`, and passes each to all `readers`.

    A record costs half as much in a batch, because the code and data of each reader are in the processor's caches.
    """

    def __init__(self, *readers: Callable[[RequestExit], None]) -> None:
        self._readers = readers
        self._ended: list[RequestExit] = []
        self._timer: asyncio.TimerHandle | None = None

    def record(self, ended: RequestExit) -> None:
        """Queues the record of a finished request."""
        self._ended.append(ended)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        """Passes on all queued records now. An exception of a reader is logged, and the next record is passed on."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        batch, self._ended = self._ended, []
        for read in self._readers:
            for ended in batch:
                try:
                    read(ended)
                except Exception as error:  # noqa: BLE001 - the request has ended, and other records must not be lost
                    log_internal(ended.request_id, error)


class Exits(ExitBatch):
    """The `ExitSink` of the scheduler process. Passes each record to the metrics (`counted`) and to all `readers`."""

    def __init__(self, counted: ExitSink, *readers: Callable[[RequestExit], None]) -> None:
        super().__init__(counted.record, *readers)
        self.attempted, self.log_lines_lost = counted.attempted, counted.log_lines_lost
