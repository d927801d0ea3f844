"""A process begins with the batch limits that the process before it learned."""

from __future__ import annotations

from pathlib import Path

from llmproxy.backends.state_file import State, StateFile
from llmproxy.core.domain import KnownLimit
from llmproxy.lab.simulator.replica import Replica, ReplicaOptions
from tests.e2e.proxies import serving, until


async def test_next_process_begins_with_the_learned_limit(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    async with serving(ReplicaOptions(), state=StateFile(path)) as proxy:
        url = proxy.replicas[0].url
        backend = proxy.app.pools.backends["b0"]
        await until(lambda: backend.reading is not None)
        backend.limit.begin_at(7, converged=True)
    (known,) = StateFile(path).read().limits.items()
    assert known[0] == url
    assert (known[1].limit, known[1].settled) == (7, True)


async def test_backend_begins_with_the_remembered_limit_of_its_url(tmp_path: Path) -> None:
    class Remembered(StateFile):
        def read(self) -> State:
            return State(remembered)

    remembered: dict[str, KnownLimit] = {}
    async with Replica(ReplicaOptions()) as replica:
        async with serving(extra=[replica.url]) as one:
            models, length = one.app.pools.backends["b0"]._kind or ((), None)
            initial = one.app.pools.settings.capacity.initial_batch_limit
        for of, begins in ((models, 7), (("another",), initial)):
            remembered[replica.url] = KnownLimit(7, True, of, length)
            async with serving(extra=[replica.url], state=Remembered(tmp_path / "state.json")) as next_one:
                assert next_one.app.pools.backends["b0"].limit.value == begins
