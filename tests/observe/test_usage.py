"""The use of tenants by day: sums over processes, restarts, midnight, time zones, broken files and a full disk."""

from __future__ import annotations

import asyncio
import errno
import os
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import orjson
import pytest

from llmproxy.core.queueing.day_budgets import DayBudgets
from llmproxy.core.settings import UsageLimit
from llmproxy.observe import usage as module
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.usage import Usage, Used, process_name, total
from llmproxy.scheduling.attempt import Attempt
from tests.core.make import request

BERLIN = ZoneInfo("Europe/Berlin")


class Clock:
    def __init__(self, text: str, zone: ZoneInfo = BERLIN) -> None:
        self.now_s = datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()

    def __call__(self) -> float:
        return self.now_s


def ended(tenant: str = "acme", model: str = "m", tokens: int = 10, *, attempts: int = 1) -> RequestExit:
    attempt = Attempt(prompt_tokens=tokens, cached_tokens=tokens // 2, output_tokens=1)
    return RequestExit(
        request_id="r", method="POST", path="/v1/completions", model=model, tenant=tenant, key="laptop",
        attempts=attempts, tried=[attempt] if attempts else [],
    )  # fmt: skip


def ledger(folder: Path | None, clock: Clock, process: str = "one") -> Usage:
    return Usage(folder, process, BERLIN, clock)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def written(usage: Usage) -> None:
    """Stops the task that writes, which writes once more at its end."""
    task = asyncio.create_task(usage.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def uncounted(*estimated: tuple[int, int]) -> RequestExit:
    """Returns the record of a request whose engines counted nothing."""
    tried = [Attempt(estimated_prompt_tokens=prompt, estimated_output_tokens=output) for prompt, output in estimated]
    return RequestExit(
        request_id="r", method="POST", path="/v1/completions", model="m", tenant="acme", tried=tried, attempts=1
    )


def of(usage: Usage, tenant: str = "acme") -> Used:
    usage.read_others()
    return total(usage.of_tenant(tenant))


async def test_the_use_is_the_sum_over_processes_and_restarts(tmp_path: Path) -> None:
    clock = Clock("2026-11-28T10:00")
    first, second = ledger(tmp_path, clock, "one"), ledger(tmp_path, clock, "two")
    for usage in (first, second, second):
        usage.record(ended())
    second.record(ended("other"))
    await written(first)
    await written(second)
    later = ledger(tmp_path, clock, "three")
    later.record(ended(tokens=5))
    assert of(later) == Used(4, 35, 17, 4)
    lines = [orjson.loads(line) for path in files(tmp_path) for line in path.read_bytes().splitlines()]
    assert sorted((line["day"], line["tenant"], line["key"]) for line in lines) == [
        ("2026-11-28", "acme", "laptop"), ("2026-11-28", "acme", "laptop"), ("2026-11-28", "other", "laptop"),
    ]  # fmt: skip


@pytest.mark.parametrize("in_files", [True, False])
async def test_days_and_months_end_at_midnight_of_the_zone(tmp_path: Path, in_files: bool) -> None:
    clock = Clock("2026-11-29T23:59:59")
    usage = ledger(tmp_path if in_files else None, clock)
    usage.record(ended())
    assert usage.day_left_s() == 1.0
    clock.now_s += 1.0
    usage.record(ended(tokens=20))
    assert of(usage).requests == 2
    assert total(usage.of_today()).prompt_tokens == 20
    clock.now_s += 86_400.0
    assert (of(usage).requests, usage.today()) == (0, "2026-12-01")
    usage.record(ended())
    assert of(usage).requests == 1


@pytest.mark.parametrize(
    ("day", "hours"), [("2026-10-25T00:00", 25), ("2026-03-29T00:00", 23), ("2026-11-28T00:00", 24)]
)
def test_days_with_a_change_of_the_clock(day: str, hours: int) -> None:
    assert ledger(None, Clock(day)).day_left_s() == hours * 3600.0


def test_a_clock_that_is_set_back_counts_on_the_later_day() -> None:
    clock = Clock("2026-11-28T00:00")
    usage = ledger(None, clock)
    usage.record(ended())
    clock.now_s -= 5.0
    usage.record(ended())
    clock.now_s += 5.0
    assert total(usage.of_today()).requests == 2


def test_refused_requests_do_not_count() -> None:
    usage = ledger(None, Clock("2026-11-28T10:00"))
    usage.record(ended(attempts=0))
    assert of(usage) == Used()


async def test_a_file_that_is_cut_loses_only_its_last_line(tmp_path: Path) -> None:
    clock = Clock("2026-11-28T10:00")
    usage = ledger(tmp_path, clock)
    usage.record(ended())
    usage.record(ended("other"))
    await written(usage)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for size in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:size] + b"\n\xff\xfe[1]")
        assert of(ledger(tmp_path, clock, "two")).requests == 1


def test_estimates_count_and_are_marked() -> None:
    usage = ledger(None, Clock("2026-11-28T10:00"))
    usage.record(uncounted((7, 3), (0, 2)))
    assert of(usage) == Used(1, 7, 0, 5, 12)
    # The counts of the engine that wrote the rest of a stream are of the whole answer.
    counted = uncounted((7, 3), (0, 0))
    counted.last.prompt_tokens, counted.last.output_tokens = 6, 9
    usage.record(counted)
    assert of(usage) == Used(2, 13, 0, 14, 12)


@pytest.mark.parametrize("what", ["stat", "glob"])
async def test_files_that_cannot_be_read_for_a_moment_keep_their_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    clock = Clock("2026-11-28T10:00")
    first, second = ledger(tmp_path, clock, "one"), ledger(tmp_path, clock, "two")
    first.record(ended())
    await written(first)
    assert of(second).requests == 1

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    clock.now_s += 60.0
    with monkeypatch.context() as patched:
        patched.setattr(Path, what, stale)
        assert of(second).requests == 1
    clock.now_s += 60.0
    files(tmp_path)[0].unlink()
    assert of(second).requests == 0


def test_a_clock_that_was_days_ahead_books_on_the_real_day_after_its_correction(tmp_path: Path) -> None:
    clock = Clock("2031-01-05T00:10")
    usage = ledger(tmp_path, clock)
    usage.record(ended())
    clock.now_s = Clock("2026-11-28T10:00").now_s
    usage.record(ended())
    usage.record(ended())
    assert of(usage).requests == 2
    assert [line.day for line in usage.of_today()] == ["2026-11-28"]


async def test_a_failed_write_over_the_end_of_the_month_keeps_the_last_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock("2026-11-30T23:59")
    usage = ledger(tmp_path, clock)
    usage.record(ended())
    await written(usage)
    usage.record(ended())

    def hung(*_: object) -> None:
        # The folder hangs over midnight, and then fails.
        clock.now_s += 60.0
        usage.record(ended())
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", hung)
        await written(usage)
    await written(usage)
    lines = {path.name: orjson.loads(path.read_bytes()) for path in files(tmp_path)}
    counted = {name: line["models"]["m"]["requests"] for name, line in lines.items()}
    assert counted == {"2026-11-30.one.jsonl": 2, "2026-12-01.one.jsonl": 1}


async def test_a_full_disk_loses_nothing_when_there_is_room_again(tmp_path: Path) -> None:
    folder, clock = tmp_path / "usage", Clock("2026-11-28T23:59")
    folder.write_text("no folder")
    usage = ledger(folder, clock)
    usage.record(ended())
    await written(usage)
    clock.now_s += 60.0
    usage.record(ended())
    await written(usage)
    folder.unlink()
    await written(usage)
    assert of(usage).requests == 2
    assert of(ledger(folder, clock, "two")).requests == 2
    assert [path.name for path in files(folder)] == ["2026-11-28.one.jsonl", "2026-11-29.one.jsonl"]


def test_models_beyond_the_limit_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 2)
    usage = ledger(None, Clock("2026-11-28T10:00"))
    for model in ("a", "b", "c", "d", "a"):
        usage.record(ended(model=model))
    (line,) = usage.of_today()
    assert {model: used.requests for model, used in line.models.items()} == {"a": 2, "b": 1, "unknown": 2}


async def test_budgets_begin_with_the_use_of_the_day(tmp_path: Path) -> None:
    clock = Clock("2026-11-28T10:00")
    usage = ledger(tmp_path, clock)
    usage.record(ended(tokens=59))
    await written(usage)
    days = DayBudgets({"tenant:acme": UsageLimit(tokens_per_day=100), "model:m": UsageLimit(requests_per_day=3)})
    await ledger(tmp_path, clock, "two").begin_day(days)
    now = asyncio.get_running_loop().time()
    assert days.left("tenant:acme", now) == (None, 40.0)
    assert days.left("model:m", now) == (2.0, None)


async def test_the_budget_of_a_model_counts_its_aliases_after_a_restart(tmp_path: Path) -> None:
    clock = Clock("2026-11-28T10:00")
    usage = ledger(tmp_path, clock)
    record = ended(model="alias", tokens=59)
    record.served_as = "m"
    usage.record(record)
    assert of(usage) == Used(1, 59, 29, 1)
    await written(usage)
    days = DayBudgets({name: UsageLimit(tokens_per_day=100) for name in ("model:alias", "model:m", "tenant:acme")})
    await ledger(tmp_path, clock, "two").begin_day(days)
    now = asyncio.get_running_loop().time()
    assert {days.left(name, now) for name in ("model:alias", "model:m", "tenant:acme")} == {(None, 40.0)}


async def test_a_clock_that_was_days_ahead_leaves_the_budget_of_the_real_day(tmp_path: Path) -> None:
    clock = Clock("2031-01-05T12:00")
    usage, days = ledger(tmp_path, clock), DayBudgets({"tenant:acme": UsageLimit(tokens_per_day=100)})
    await usage.begin_day(days)
    clock.now_s = Clock("2026-11-28T10:00").now_s
    usage.record(ended(tokens=89))
    await usage.begin_day(days)
    assert days.left("tenant:acme", asyncio.get_running_loop().time()) == (None, 10.0)


async def test_a_clock_that_is_set_back_over_midnight_gives_no_second_budget(tmp_path: Path) -> None:
    clock = Clock("2026-11-28T23:59:30")
    usage, days = ledger(tmp_path, clock), DayBudgets({"tenant:acme": UsageLimit(tokens_per_day=100)})
    now, left = asyncio.get_running_loop().time(), []
    usage.record(ended(tokens=89))
    for step_s, tokens in ((60.0, 19), (-60.0, 9), (60.0, 0)):
        clock.now_s += step_s
        await usage.begin_day(days)
        if tokens:
            usage.record(ended(tokens=tokens))
            days.used(request(limits=("tenant:acme",)), tokens + 1.0, now)
        left.append(days.left("tenant:acme", now)[1])
    # The earlier day has its own use. Requests that end after midnight count on the later day.
    assert left == [80.0, 0.0, 70.0]


def test_names_of_files_are_safe() -> None:
    assert process_name("../../a b", 7.9).startswith("______a_b-")
