"""Counts the requests and tokens of each tenant, key and model by calendar day, and keeps the counts in files.

Each process has one file a day, with a JSON line for each tenant and key, and replaces it as a whole. The use of a day
is the sum of all files of the day, so processes that follow each other, and members of a cluster with a shared folder,
need no lock.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from threading import Lock
from zoneinfo import ZoneInfo

import msgspec
import structlog

from llmproxy.config import model_limit, tenant_limit
from llmproxy.core.queueing.day_budgets import MONEY, DayBudgets
from llmproxy.core.queueing.rate_limits import REQUESTS, TOKENS, RateName
from llmproxy.observe.exit import UNKNOWN_MODEL, RequestExit

WRITE_S = 1.0  # The seconds between two writes of the file. A process that is killed loses the use of this time.
DAY_CHECK_S = 60.0  # The maximum seconds between two checks of the day.
OTHERS_S = 5.0  # The minimum seconds between two reads of the files of other processes.
ENTRIES_MAX = 100_000
"""The maximum number of combinations of tenant, key and model in a day. Further models count under UNKNOWN_MODEL."""
FILE_BYTES_MAX = 64 << 20
CLOCK_ERROR_S = 7200.0
"""A day continues if the clock is set back to at most this long before the day began. Otherwise another day begins."""
Who = tuple[str, str]  # The tenant and the name of the key.

_log = structlog.get_logger()


class Used(msgspec.Struct, omit_defaults=True):
    """The use of a model, or of all models together.

    Tokens are the engines' counts. Where an engine did not count, they are estimates.
    """

    requests: int = 0
    prompt_tokens: int = 0
    # The prompt tokens that the engine had cached; `prompt_tokens` includes them.
    cached_tokens: int = 0
    output_tokens: int = 0
    # The prompt and output tokens that are estimates; the other two counts include them.
    estimated_tokens: int = 0

    def add(self, other: Used) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.estimated_tokens += other.estimated_tokens

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Line(msgspec.Struct, omit_defaults=True):
    """A line of a file: the use of one key of a tenant on one day."""

    day: str
    tenant: str
    key: str
    # The name of the model that clients requested -> use.
    models: dict[str, Used]
    # The model behind an alias, or the base model of an adapter -> the part of the use in `models` that it served.
    served_as: dict[str, Used] = {}
    # External backend -> the cost of the requests that it served.
    costs: dict[str, float] = {}


_DECODER = msgspec.json.Decoder(Line)


class Usage:
    """The use of all tenants.

    Args:
        folder: Folder of the files; None keeps the use of this process in memory.
        process: Part of the file's name that no other process has.
        zone: Time zone of the days.
        clock: Returns the Unix time.
    """

    def __init__(
        self,
        folder: Path | None,
        process: str,
        zone: ZoneInfo,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._process, self._zone, self._clock = folder, process, zone, clock
        self.zone = zone.key
        self._today = self.today()
        self._day_began_s, self._day_ends_s = clock(), clock() + self.day_left_s()
        self._lines: dict[Who, Line] = {}
        self._entries = 0
        # The use of this process on the ended days of the month, by tenant.
        self._earlier: dict[str, list[Line]] = {}
        # The days whose use is not in their file yet, and the days whose file a thread writes.
        self._unwritten: set[str] = set()
        self._in_writing: set[str] = set()
        self._writer = Lock()
        # File -> (its modification time in ns, its lines by tenant).
        self._others: dict[Path, tuple[int, dict[str, list[Line]]]] = {}
        self._others_s = 0.0
        self._warned = ""

    def today(self) -> str:
        """Returns the current day in the configured time zone, as YYYY-MM-DD."""
        return datetime.fromtimestamp(self._clock(), self._zone).date().isoformat()

    def day_left_s(self) -> float:
        """Returns the seconds until the next day. Days with a change of the clock have 23 or 25 hours."""
        now = datetime.fromtimestamp(self._clock(), self._zone)
        tomorrow = datetime.combine(now.date() + timedelta(days=1), datetime.min.time(), self._zone)
        return tomorrow.timestamp() - now.timestamp()

    def record(self, ended: RequestExit) -> None:
        """Counts a finished request that was granted a backend."""
        if not ended.attempts:
            return
        if not self._day_began_s - CLOCK_ERROR_S <= self._clock() < self._day_ends_s:
            self._end_day()
        last = ended.last
        if last.prompt_tokens is not None and not last.estimated_output_tokens:
            used = Used(1, last.prompt_tokens, last.cached_tokens or 0, last.output_tokens or 0)
        else:
            used = _partly_estimated(ended)
        key = ended.key or ""
        line = self._lines.get((ended.tenant, key))
        if line is None:
            line = Line(self._today, ended.tenant, key, {})
            self._lines[line.tenant, line.key] = line
        model = ended.model if ended.model in line.models or self._entries < ENTRIES_MAX else UNKNOWN_MODEL
        if model not in line.models:
            line.models[model] = Used()
            self._entries += 1
        line.models[model].add(used)
        if ended.served_as is not None:
            line.served_as.setdefault(ended.served_as, Used()).add(used)
        for one in ended.tried:
            if one.cost and one.backend is not None:
                line.costs[one.backend] = line.costs.get(one.backend, 0.0) + one.cost
        self._unwritten.add(self._today)

    def _end_day(self) -> None:
        today = self.today()
        kept = self._unwritten | self._in_writing
        lines = (*_lines_of(self._earlier), *self._lines.values())
        self._earlier = _by_tenant(line for line in lines if line.day[:7] == today[:7] or line.day in kept)
        self._today, self._lines, self._entries = today, {}, 0
        self._day_began_s, self._day_ends_s = self._clock(), self._clock() + self.day_left_s()

    # --- sums ---------------------------------------------------------------------------------------------------------

    def of_tenant(self, tenant: str) -> Iterator[Line]:
        """Yields the lines of a tenant in the current month, of this process and of the files that were read last."""
        month = self.today()[:7]
        for lines in (*(lines for _, lines in self._others.values()), self._earlier):
            yield from (line for line in lines.get(tenant, ()) if line.day[:7] == month)
        yield from (line for line in self._lines.values() if line.tenant == tenant and line.day[:7] == month)

    def of_today(self) -> Iterator[Line]:
        """Yields the lines of today, of all tenants."""
        today = self.today()
        for lines in (*(lines for _, lines in self._others.values()), self._earlier):
            yield from (line for line in _lines_of(lines) if line.day == today)
        yield from (line for line in self._lines.values() if line.day == today)

    def read_others(self) -> None:
        """Reads the files of this month that other processes have changed, at most every OTHERS_S.

        Blocks on the disk.
        """
        now = self._clock()
        if self._folder is None or abs(now - self._others_s) < OTHERS_S:
            return
        self._others_s = now
        others = {}
        try:
            paths = list(self._folder.glob(f"{self.today()[:7]}-??.*.jsonl"))
        except OSError as error:
            self._warn("read", self._folder, error)
            return
        for path in paths:
            if path == self._path(path.name[: len(self._today)]):
                continue
            known = self._others.get(path)
            try:
                changed_ns = path.stat().st_mtime_ns
                others[path] = (
                    known if known is not None and known[0] == changed_ns else (changed_ns, _by_tenant(_read(path)))
                )
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                # A network file system may be away for a moment.
                if known is not None:
                    others[path] = known
                self._warn("read", path, error)
        self._others = others

    # --- budgets ------------------------------------------------------------------------------------------------------

    async def begin_day(self, days: DayBudgets) -> None:
        """Tells the budgets which day it is, and how much of them all processes have used today.

        A further call on the same day corrects the end of the day, and can only raise the use.
        """
        await asyncio.to_thread(self.read_others)
        now = asyncio.get_running_loop().time()
        days.begin(self.today(), now + self.day_left_s(), now)
        used = of_limits(self.of_today())
        days.restore({(name, REQUESTS): float(one.requests) for name, one in used.items()})
        days.restore({(name, TOKENS): float(one.tokens) for name, one in used.items()})
        costs: dict[RateName, float] = defaultdict(float)
        for line in self.of_today():
            for backend, cost in line.costs.items():
                costs[backend, MONEY] += cost
        days.restore(costs)

    async def follow_days(self, days: DayBudgets) -> None:
        """Calls `begin_day` at each midnight, until the task is cancelled.

        Calls it once a minute too, because clocks may be set.
        """
        while True:
            await asyncio.sleep(min(DAY_CHECK_S, self.day_left_s()))
            await self.begin_day(days)

    # --- files --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Writes the use every WRITE_S if it has changed, and once more when the task is cancelled.

        Returns at once without a folder.
        """
        try:
            while self._folder is not None:
                await asyncio.sleep(WRITE_S)
                # Encoded here, because the lines change while a thread writes.
                for day, content in self._due():
                    await asyncio.to_thread(self._replace, day, content)
        finally:
            for day, content in self._due():
                self._replace(day, content)

    def _due(self) -> list[tuple[str, bytes]]:
        """Returns the day and the content of each file that must be written."""
        due, self._unwritten = self._unwritten, set()
        self._in_writing = due
        lines = (*_lines_of(self._earlier), *self._lines.values())
        return [(day, _encoded(line for line in lines if line.day == day)) for day in due]

    def _path(self, day: str) -> Path:
        return (self._folder or Path()) / f"{day}.{self._process}.jsonl"

    def _replace(self, day: str, content: bytes) -> None:
        if self._folder is None:
            return
        path = self._path(day)
        new = path.with_suffix(".new")
        try:
            # At the end of the process, a thread may still be writing.
            with self._writer:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with new.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(path)
        except OSError as error:
            self._unwritten.add(day)
            with suppress(OSError):
                new.unlink()
            self._warn("written", path, error)

    def _warn(self, what: str, path: Path, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        if why != self._warned:
            self._warned = why
            _log.warning(f"usage_not_{what}", path=str(path), why=why)


def _partly_estimated(ended: RequestExit) -> Used:
    """Returns the use of a request whose last engine counted no tokens, or not all."""
    used = Used(1)
    for one in ended.tried if ended.last.prompt_tokens is None else (ended.last,):
        if one.prefilled:
            # The decode stage counts the prompt too.
            continue
        used.prompt_tokens += (one.prompt_tokens or 0) + one.estimated_prompt_tokens
        used.cached_tokens += one.cached_tokens or 0
        used.output_tokens += (one.output_tokens or 0) + one.estimated_output_tokens
        used.estimated_tokens += one.estimated_prompt_tokens + one.estimated_output_tokens
    return used


def _by_tenant(lines: Iterable[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.tenant, []).append(line)
    return found


def _lines_of(by_tenant: Mapping[str, list[Line]]) -> Iterator[Line]:
    return chain.from_iterable(by_tenant.values())


def _encoded(lines: Iterable[Line]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _read(path: Path) -> list[Line]:
    """Returns the readable lines of a file. Raises OSError, and ValueError for a file that is too large."""
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    lines = []
    for text in content.splitlines():
        with suppress(msgspec.DecodeError, RecursionError):
            lines.append(_DECODER.decode(text))
    return lines


def total(lines: Iterable[Line]) -> Used:
    """Returns the sum over all lines and models."""
    used = Used()
    for line in lines:
        for one in line.models.values():
            used.add(one)
    return used


def process_name(member: str, now_s: float) -> str:
    """Returns a part of a file name that no other process has."""
    safe = "".join(character if character.isalnum() or character == "-" else "_" for character in member)[:64]
    return f"{safe}-{os.getpid()}-{int(now_s)}"


def of_limits(lines: Iterable[Line]) -> dict[str, Used]:
    """Maps the names of usage limits, of tenants and of models, to the use in `lines`."""
    found: dict[str, Used] = {}
    for line in lines:
        for model, used in (*line.models.items(), *line.served_as.items()):
            found.setdefault(model_limit(model), Used()).add(used)
        if line.tenant:
            found.setdefault(tenant_limit(line.tenant), Used()).add(total([line]))
    return found
