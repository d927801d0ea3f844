"""Sockets of workers, restarts of workers, and updates that reach all workers in time."""

from __future__ import annotations

import asyncio
import pickle
import socket
from contextlib import ExitStack
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from llmproxy.config import BackendConfig, Config, ConfigError
from llmproxy.core.domain import Usage
from llmproxy.gateway.build import Gateway
from llmproxy.gateway.proxying.rules import Rules
from llmproxy.lifecycle.sockets import Sockets
from llmproxy.observe.metrics import Metrics
from llmproxy.remote import messages
from llmproxy.remote.workers.supervisor import WorkerSession, WorkerSupervisor, dealt_sockets
from llmproxy.upstream.port import Upstream
from tests.core.make import listing
from tests.dispatching import dispatcher, turns, virtual
from tests.remote.workers.link import Nowhere, RecordedEvents

# --- sockets ----------------------------------------------------------------------------------------------------------


class Named:
    """A socket with only an address."""

    def __init__(self, name: str) -> None:
        self._name = name

    def getsockname(self) -> str:
        return self._name


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 8))
def test_every_worker_listens_at_every_address(names: list[str], count: int) -> None:
    sockets = [Named(name) for name in names]
    hands = dealt_sockets(sockets, count)  # type: ignore[arg-type]
    assert len(hands) == count
    for hand in hands:
        assert {one.getsockname() for one in hand} == set(names)
    assert {id(one) for hand in hands for one in hand} == {id(one) for one in sockets}
    for name in set(names):
        of_one = [sum(one.getsockname() == name for one in hand) for hand in hands]
        assert max(of_one) - min(of_one) <= 1


def test_workers_share_a_port_with_no_other_program() -> None:
    with ExitStack() as stack:
        opened, held = Sockets().listening("127.0.0.1", 0, 3)
        for one in opened:
            stack.enter_context(one)
        assert (len(opened), held) == (3, False)
        [address] = {one.getsockname() for one in opened}
        assert all(one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) for one in opened)
        with pytest.raises(OSError, match="in use"):
            Sockets().listening("127.0.0.1", address[1], 3)


# --- what every worker knows ------------------------------------------------------------------------------------------


NOWHERE = cast(Upstream, Nowhere())


async def no_page(page: messages.PageRequest) -> messages.PageResponse:
    raise NotImplementedError


class RecordingSession(WorkerSession):
    """A session without a worker that records its messages."""

    def __init__(self, supervisor: WorkerSupervisor) -> None:
        super().__init__(supervisor._services, supervisor._sinks)
        self.services, self.sinks = supervisor._services, supervisor._sinks
        self.sent: list[messages.Sendable] = []
        self.link.send = self.sent.append  # type: ignore[method-assign, assignment]


class Supervised:
    """A supervisor with its gateway and dispatcher. Its workers are recording sessions."""

    def __init__(self, backends: dict[str, BackendConfig] | None = None, count: int = 2) -> None:
        backends = {} if backends is None else backends
        self.dispatcher = dispatcher(a=1)
        self.events = RecordedEvents()
        one, metrics = self.dispatcher, cast(Metrics, self.events)
        self.gateway = Gateway.build(Config(), backends, NOWHERE, one, one.pools.estimator, metrics)
        self.supervisor = WorkerSupervisor(self.gateway, one, backends, metrics, no_page, socket_activated=False)
        self.sessions = [RecordingSession(self.supervisor) for _ in range(count)]
        self.supervisor._sessions.update(enumerate(self.sessions))

    def reconfigured(self, config: Config) -> None:
        self.gateway.rulebook.current = Rules.build(config, NOWHERE)


@virtual
async def test_a_change_is_sent_once_to_all_workers() -> None:
    backends = {"a": BackendConfig(url="http://a:1", name="a")}
    rig = Supervised(backends)
    one, sessions = rig.dispatcher, rig.sessions
    one.reconsider()
    one.listed("a", listing())
    await turns()
    assert [session.sent for session in sessions] == [[], []], "it lists the same as before"
    one.listed("a", listing("lora"))
    one.reconsider()
    await turns()
    for session in sessions:
        [fleet] = session.sent
        assert isinstance(fleet, messages.KnownBackends)
        assert fleet.targets.keys() == {"base", "lora"}
        assert fleet.unnamed == fleet.targets["base"]
        assert pickle.loads(fleet.backends) == (backends["a"],)
    backends["b"] = BackendConfig(url="http://b:1", name="b", api_key="k")
    one.reconsider()
    await turns()
    for session in sessions:
        fleet = session.sent[-1]
        assert isinstance(fleet, messages.KnownBackends)
        assert [(backend.name, backend.api_key) for backend in pickle.loads(fleet.backends)] == [
            ("a", None),
            ("b", "k"),
        ]


@virtual
async def test_a_change_is_sent_before_a_grant_that_follows_from_it() -> None:
    backends = {"a": BackendConfig(url="http://a:1", name="a")}
    rig = Supervised(backends)
    session = rig.sessions[0]
    backends["b"] = BackendConfig(url="http://b:1", name="b")
    rig.dispatcher.reconsider()
    # A session does this before it sends a grant.
    rig.supervisor.update_workers()
    assert isinstance(session.sent[0], messages.KnownBackends)
    await turns()
    assert len(session.sent) == 1


@virtual
async def test_each_step_of_the_shutdown_is_sent() -> None:
    rig = Supervised()
    supervisor, session = rig.supervisor, rig.sessions[0]
    supervisor.begin_shutdown()
    await turns()
    rig.dispatcher.drain(finish_waiting=True)
    await turns()
    rig.dispatcher.drain()
    await turns()
    assert session.sent == [
        messages.ShutdownState(leaving=True),
        messages.ShutdownState(leaving=True, draining=True),
        messages.ShutdownState(leaving=True, draining=True, granting=False),
    ]
    assert supervisor.open_requests == 0, "a worker that has not said yet that it is idle may have no request"


@virtual
async def test_estimates_and_stored_responses_are_sent_to_other_workers() -> None:
    rig = Supervised()
    maker, other = rig.sessions
    maker.services.stored(messages.ResponseStored("resp_1", "a", "t"), maker.server)
    assert (maker.sent, other.sent) == ([], [messages.ResponseStored("resp_1", "a", "t")])
    assert dict(rig.gateway.stored.made_by) == {"resp_1": ("a", "t")}
    # Two workers saw the same id made in the same instant: whose word came first, it is, for both.
    maker.services.stored(messages.ResponseStored("resp_1", "b", "u"), other.server)
    assert (maker.sent, other.sent) == ([], [messages.ResponseStored("resp_1", "a", "t")] * 2)
    assert dict(rig.gateway.stored.made_by) == {"resp_1": ("a", "t")}
    for _ in range(5):
        rig.dispatcher.pools.estimator.learn("base", 300, 1, Usage(100, 50))
        maker.sinks.learned("base")
    await turns()
    assert not maker.sent, "not with every answer"
    await asyncio.sleep(1.0)
    [estimates] = maker.sent
    assert isinstance(estimates, messages.LearnedEstimates)
    assert (estimates.models["base"].seen, estimates.models["base"].output_tokens) == (5, 50.0)
    maker.sinks.learned("base")
    await asyncio.sleep(1.0)
    assert len(maker.sent) == 2


@virtual
async def test_stored_responses_pass_between_workers_and_the_leader() -> None:
    rig = Supervised()
    maker, other = rig.sessions
    reported: list[tuple[str, str, str]] = []
    rig.gateway.stored.on_made = lambda *made: reported.append(made)
    maker.services.stored(messages.ResponseStored("resp_1", "a", "t"), maker.server)
    assert reported == [("resp_1", "a", "t")]
    # The leader has heard of another owner first.
    rig.gateway.stored.note("resp_1", "b", "u", authoritative=True)
    assert (maker.sent[-1], other.sent[-1]) == (messages.ResponseStored("resp_1", "b", "u"),) * 2
    assert len(reported) == 1


@virtual
async def test_a_reload_sends_the_whole_configuration() -> None:
    rig = Supervised()
    new = Config(models=[{"name": "alias", "target": "base"}])  # type: ignore[arg-type]
    rig.reconfigured(new)
    rig.supervisor.reconfigure()
    [message] = rig.sessions[0].sent
    assert isinstance(message, messages.NewConfig)
    assert pickle.loads(message.config) == new


@virtual
async def test_the_start_fails_when_a_worker_does_not_start() -> None:
    rig = Supervised()
    session, other = rig.sessions

    async def begin(slot: int) -> None:
        if slot:
            other.url.set_result("http://h:1")
        else:
            session.url.cancel()

    rig.supervisor._begin = begin  # type: ignore[method-assign]
    rig.reconfigured(Config(workers=2))
    with pytest.raises(ConfigError, match="did not start"):
        await rig.supervisor.start([])


# --- lost workers -----------------------------------------------------------------------------------------------------


class Mortal:
    """A process that is over."""

    pid = 4711


@virtual
async def test_a_worker_that_dies_early_restarts_after_longer_pauses() -> None:
    rig = Supervised(count=1)
    supervisor = rig.supervisor
    lives_s = [0.0, 0.0, 0.0, 60.0, 0.0]
    begun_s: list[float] = []

    async def begin(slot: int) -> None:
        begun_s.append(asyncio.get_running_loop().time())
        if len(begun_s) == 3:
            raise OSError("no memory")
        supervisor._sessions[slot] = RecordingSession(supervisor)
        asyncio.get_running_loop().call_later(lives_s.pop(0), supervisor._sessions[slot].gone.set)

    async def ended(_: object) -> int:
        supervisor._ending = not lives_s
        return -9

    supervisor._begin = begin  # type: ignore[method-assign]
    supervisor._processes[0] = Mortal()  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmproxy.remote.workers.supervisor._ended", ended)
        await begin(0)
        await supervisor._restart(0)
    # Dead at once: 0.5 s. Dead at once again: 1 s. Not even started: 2 s. Dead at once: 4 s. After a minute: no pause.
    assert begun_s == [0.0, 0.5, 1.5, 3.5, 7.5, 67.5]
    assert rig.events.lost == 4, "a worker that was not started was not lost"


@virtual
@pytest.mark.parametrize("closed", [False, True], ids=["while-it-still-accepts", "with-closed-sockets"])
async def test_a_worker_that_dies_in_the_shutdown_is_counted_and_replaced_while_the_proxy_accepts(closed: bool) -> None:
    rig = Supervised(count=1)
    supervisor = rig.supervisor
    begun: list[int] = []

    async def begin(slot: int) -> None:
        begun.append(slot)
        supervisor._ending = True
        supervisor._sessions[slot] = RecordingSession(supervisor)
        supervisor._sessions[slot].gone.set()

    async def ended(_: object) -> int:
        return -9

    supervisor._begin = begin  # type: ignore[method-assign]
    supervisor._processes[0] = Mortal()  # type: ignore[assignment]
    supervisor.begin_shutdown()
    if closed:
        await supervisor.close_sockets()
    rig.sessions[0].gone.set()
    with pytest.MonkeyPatch.context() as patch, capture_logs() as lines:
        patch.setattr("llmproxy.remote.workers.supervisor._ended", ended)
        await supervisor._restart(0)
    assert begun == ([] if closed else [0])
    assert rig.events.lost == 1
    assert [(line["event"], line["again_in_s"]) for line in lines] == [("worker_lost", None if closed else 0.5)]
