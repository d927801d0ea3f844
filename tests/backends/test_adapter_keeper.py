"""The orders that backends get when an adapter is loaded or unloaded, and the use of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from llmproxy.backends.adapter_keeper import MESSAGE_CHARS_MAX, AdapterKeeper
from llmproxy.config import BackendConfig, TimeoutsConfig
from llmproxy.core.adapters import Adapters, Reply, Report
from llmproxy.core.domain import Listing, ModelCard
from llmproxy.upstream.port import Body, ConnectFailed, Headers, UpstreamBroken
from tests.core.make import BASE, pools

LOADED = b"Success: LoRA adapter 'x' added successfully."
Made = tuple[int, bytes] | Exception


@dataclass
class FakeExchange:
    status: int
    pieces: list[bytes]
    reason: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    closed: bool = False

    @property
    def ended(self) -> bool:
        return not self.pieces

    async def chunk(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def flow(self, sink: Callable[[bytes], None]) -> None:
        raise AssertionError(f"what answers here is pulled, and goes to no {sink}")

    def halt(self) -> None:
        raise AssertionError("what answers here is pulled")

    pause = resume = halt

    def close(self) -> None:
        self.closed = True


class Fleet:
    """Backends `a` and `b` behind a fake client. It answers with the rest of `answers` in order, then with success."""

    def __init__(self) -> None:
        self.pools = pools({"a": None, "b": None})
        self.adapters = Adapters(self.pools)
        self.answers: list[Made] = []
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.exchanges: list[FakeExchange] = []
        self.held = asyncio.Event()
        self.held.set()
        self.at_once = self.most_at_once = 0
        self.counted: list[tuple[str, str, bool]] = []
        self.loaded: dict[str, list[str]] = {"a": [], "b": []}
        backends = {name: BackendConfig(url=f"http://{name}", name=name) for name in self.loaded}
        self.keeper = AdapterKeeper(
            self.adapters, self.pools, backends, None, self, {name: Lister(self, name) for name in self.loaded},
            TimeoutsConfig(), lambda *labels: self.counted.append(labels),
        )  # fmt: skip

    async def open(
        self, base_url: str, method: str, path_qs: str, headers: Headers, body: Body, connect_timeout_s: float
    ) -> FakeExchange:
        fields = orjson.loads(b"".join(body))
        self.sent.append((base_url, path_qs, fields))
        assert method == "POST"
        assert connect_timeout_s == 5.0
        assert dict(headers) == {"content-type": "application/json"}
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self.held.wait()
        finally:
            self.at_once -= 1
        made = self.answers.pop(0) if self.answers else (200, LOADED)
        if isinstance(made, Exception):
            raise made
        status, text = made
        if status == 200:
            self.loaded[base_url.removeprefix("http://")].append(fields["lora_name"])
        self.exchanges.append(FakeExchange(status, [text[i : i + 1000] for i in range(0, len(text), 1000)]))
        return self.exchanges[-1]

    def lists(self, backend: str) -> None:
        """A poll read the adapters that the backend has now."""
        cards = [ModelCard(name, BASE, None) for name in self.loaded[backend]]
        listing = Listing(0.0, (ModelCard(BASE, None, 4096), *cards))
        self.pools.listed(backend, listing)
        self.keeper.listed(backend, listing)

    async def load(self, *names: str, replicas: int = 1) -> Report:
        for name in names:
            plan = self.adapters.load(name, f"/{name}", {"lora_name": name}, None, replicas, False)
            report = await self.keeper.carry_out(plan)
        return report

    async def quiet(self) -> None:
        """Let everything happen that is about to."""
        for _ in range(50):
            await asyncio.sleep(0)


@dataclass
class Lister:
    fleet: Fleet
    backend: str

    async def list_now(self) -> None:
        self.fleet.lists(self.backend)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    await made.keeper.close()


async def test_a_change_is_one_post_and_its_answer_is_reported(fleet: Fleet) -> None:
    report = await fleet.load("x")
    assert fleet.sent == [("http://a", "/v1/load_lora_adapter", {"lora_name": "x"})]
    assert report.replies == (Reply("a", 200, True, LOADED.decode()),)
    assert fleet.exchanges[0].closed
    await fleet.keeper.carry_out(fleet.adapters.unload("x", {"lora_name": "x"}, None, None))
    assert fleet.sent[1:] == [("http://a", "/v1/unload_lora_adapter", {"lora_name": "x"})]
    assert fleet.counted == [("a", "load", True), ("a", "unload", True)]


@pytest.mark.parametrize("error", [ConnectFailed("nobody there"), UpstreamBroken("cut")])
async def test_an_unreachable_backend_has_no_status(fleet: Fleet, error: Exception) -> None:
    fleet.answers = [error]
    report = await fleet.load("x")
    assert report.replies == (Reply("a", None, False, str(error)),)
    assert report.remembered
    assert len(fleet.sent) == 1


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error":{"message":"no such rank","type":"x"}}', "no such rank"),
        (404, b'{"detail":"Not Found"}', "Not Found: is VLLM_ALLOW_RUNTIME_LORA_UPDATING=True set for the engine?"),
        (401, b'{"error":"Unauthorized"}', '{"error":"Unauthorized"}'),
        (500, b"", "status 500"),
        (502, b"\xff" * 100_000, "�" * MESSAGE_CHARS_MAX),
    ],
)
async def test_errors_have_the_message_of_the_backend(fleet: Fleet, status: int, body: bytes, message: str) -> None:
    fleet.answers = [(status, body)]
    report = await fleet.load("x")
    assert report.replies == (Reply("a", status, False, message),)
    assert not report.remembered
    assert fleet.exchanges[0].closed


async def test_backends_get_orders_at_once_and_each_one_at_a_time(fleet: Fleet) -> None:
    fleet.held.clear()
    changes = [asyncio.create_task(fleet.load(name, replicas=2)) for name in "xyz"]
    await fleet.quiet()
    assert sorted(url for url, _, _ in fleet.sent) == ["http://a", "http://b"]
    fleet.held.set()
    assert all(reply.taken for report in await asyncio.gather(*changes) for reply in report.replies)
    assert (len(fleet.sent), fleet.most_at_once) == (6, 2)


async def test_a_backend_that_comes_back_gets_all_orders_once(fleet: Fleet) -> None:
    await fleet.load(*"xyz", replicas=2)
    fleet.loaded["a"], fleet.sent[:], fleet.counted[:] = [], [], []
    fleet.held.clear()
    with capture_logs() as logs:
        for _ in range(20):
            fleet.lists("a")
            await fleet.quiet()
        assert len(fleet.sent) == 1, "a pass is under way: further listings start no other"
        fleet.held.set()
        await fleet.quiet()
    assert [fields["lora_name"] for _, _, fields in fleet.sent] == ["x", "y", "z"]
    assert fleet.counted == [("a", "load", True)] * 3
    events = [(log["event"], log["adapter"], log["repeated"]) for log in logs]
    assert events == [("adapter_changed", name, True) for name in "xyz"]


async def test_a_repetition_ends_at_a_failure_and_goes_on_at_the_next(fleet: Fleet) -> None:
    await fleet.load(*"xyz", replicas=2)
    fleet.loaded["a"], fleet.sent[:] = [], []
    fleet.answers = [(500, b"broken")]
    fleet.lists("a")
    await fleet.quiet()
    assert [fields["lora_name"] for _, _, fields in fleet.sent] == ["x"]
    for _ in range(20):
        fleet.lists("a")
        await fleet.quiet()
    assert [fields["lora_name"] for _, _, fields in fleet.sent] == ["x", "y", "z"], "x rests before its next try"


async def test_an_order_that_is_met_meanwhile_is_not_sent(fleet: Fleet) -> None:
    await fleet.load("x", "y", replicas=2)
    fleet.loaded["a"], fleet.sent[:] = [], []
    fleet.held.clear()
    fleet.lists("a")
    await fleet.quiet()
    fleet.loaded["a"] = ["y"]
    fleet.held.set()
    await fleet.quiet()
    assert [fields["lora_name"] for _, _, fields in fleet.sent] == ["x"]


async def test_a_bug_leaves_no_change_under_way(fleet: Fleet) -> None:
    fleet.answers = [ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError):
        await fleet.load("x")
    assert not fleet.adapters.is_changing("x")


async def test_closing_cancels_orders_under_way(fleet: Fleet) -> None:
    fleet.held.clear()
    change = asyncio.create_task(fleet.load("x"))
    await fleet.quiet()
    await fleet.keeper.close()
    with pytest.raises(asyncio.CancelledError):
        await change
    assert (fleet.at_once, fleet.adapters.is_changing("x")) == (0, False)
