"""Records are passed on in batches: none is lost, and none waits longer than a batch takes."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from llmproxy.core.domain import Outcome
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_batch import ExitBatch
from tests.exits import exit_of


def _ended(name: str) -> RequestExit:
    return exit_of(request_id=name, method="POST", path="/", outcome=Outcome.COMPLETED, status=200, duration_s=0.1)


def test_every_reader_gets_all_records_in_their_order() -> None:
    async def serve() -> None:
        batch.record(_ended("a"))
        batch.record(_ended("b"))
        assert not seen
        batch.flush()
        assert seen == [("first", "a"), ("first", "b"), ("second", "a"), ("second", "b")]
        batch.flush()
        assert len(seen) == 4

    seen: list[tuple[str, str]] = []
    batch = ExitBatch(
        lambda ended: seen.append(("first", ended.request_id)),
        lambda ended: seen.append(("second", ended.request_id)),
    )
    asyncio.run(serve())


def test_records_are_passed_on_by_a_timer() -> None:
    async def serve() -> None:
        batch = ExitBatch(seen.set_result)
        batch.record(_ended("a"))
        assert (await seen).request_id == "a"

    with asyncio.Runner() as runner:
        seen: asyncio.Future[RequestExit] = runner.get_loop().create_future()
        runner.run(asyncio.wait_for(serve(), 30.0))


def test_a_record_that_fails_loses_no_other_record() -> None:
    def read(ended: RequestExit) -> None:
        if ended.request_id == "bad":
            raise ZeroDivisionError("a bug")
        seen.append(ended.request_id)

    async def serve() -> None:
        batch = ExitBatch(read, read)
        for name in ("bad", "good"):
            batch.record(_ended(name))
        with capture_logs() as log:
            batch.flush()
        assert [(line["event"], line["request_id"]) for line in log] == [("internal", "bad")] * 2

    seen: list[str] = []
    asyncio.run(serve())
    assert seen == ["good", "good"]
