"""The next leader knows the cached prompts of requests that members relayed."""

from __future__ import annotations

import asyncio

import pytest

from llmproxy.core.lease_events import Started
from llmproxy.remote.cluster import leasing
from tests.core.make import BASE
from tests.dispatching import now, virtual
from tests.remote.cluster.elections import LOCK_S
from tests.remote.cluster.virtual import VirtualMember, World, world

SOON_S = 0.05
PROMPT = tuple(range(100, 120))
ANSWERED = (*PROMPT, *range(200, 205))


def known(one: VirtualMember, hashes: tuple[int, ...] = ANSWERED) -> dict[str, int]:
    """How many of these blocks each backend holds, as this member believes."""
    placement = one.dispatcher.pools.schedulers[BASE]._placement
    return placement.inner._index.match(hashes)  # type: ignore[attr-defined, no-any-return]


async def served(one: VirtualMember, prompt: tuple[int, ...], answered: tuple[int, ...] = ()) -> None:
    """A client of this member gets the whole answer to this prompt."""
    client = one.client(prefix=prompt)
    await asyncio.sleep(SOON_S)
    assert client.lease is not None
    client.lease.apply(Started(client.lease.grant.lease), now())
    await client.done()
    if answered:
        grant = client.lease.grant
        one.leasing.cached(grant.request.pool, grant.lease, grant.placed.backend, answered)
    await asyncio.sleep(SOON_S)


async def leader_dies(found: World) -> VirtualMember:
    """The next leader."""
    dead = found.leader
    found.members.remove(dead)
    await dead.die()
    await asyncio.sleep(2 * LOCK_S)
    return found.leader


@virtual
async def test_a_next_leader_knows_the_prompts_of_all_members() -> None:
    async with world(3) as found:
        other = (2 * tuple(range(5)))[:5]
        for one, prompt in zip(found.followers, (PROMPT, other), strict=True):
            await served(one, prompt, ANSWERED if prompt == PROMPT else ())
        assert not any(known(one) for one in found.followers)
        new = await leader_dies(found)
        assert known(new) == {"a": len(ANSWERED)}
        assert known(new, other) == {"a": len(other)}


@virtual
async def test_prefixes_of_a_lost_process_are_not_sent() -> None:
    async with world(2) as found:
        [one] = found.followers
        await served(one, PROMPT)
        one.dispatcher.pools.replace_process("a")
        assert known(await leader_dies(found)) == {}


@virtual
async def test_prefixes_of_unknown_backends_are_left_out() -> None:
    async with world(2, backends="ab") as found:
        leader, [one] = found.leader, found.followers
        await served(one, PROMPT)
        [backend] = known(leader)
        assert len([*one.leasing._prefixes.all()]) == 1
        one.dispatcher.pools.remove_backend(backend)
        assert not [*one.leasing._prefixes.all()]
        one.dispatcher.pools.cached(BASE, None, backend, PROMPT)
        one.dispatcher.pools.cached("gone", None, "b", PROMPT)
        assert known(one) == {}


@pytest.mark.parametrize(("bound", "value"), [("HASHES_MAX", 2 * len(PROMPT)), ("PREFIXES_MAX", 2)])
@virtual
async def test_the_oldest_prompts_are_forgotten_first(monkeypatch: pytest.MonkeyPatch, bound: str, value: int) -> None:
    monkeypatch.setattr(leasing, bound, value)
    prompts = [tuple(range(1000 * n, 1000 * n + len(PROMPT))) for n in range(5)]
    async with world(2) as found:
        [one] = found.followers
        for prompt in prompts:
            await served(one, prompt[:5], prompt)
        held = one.leasing._prefixes
        assert held._hashes == sum(len(kept.hashes) for kept, _ in held._by_lease.values()) == 2 * len(PROMPT)
        new = await leader_dies(found)
        assert [bool(known(new, prompt)) for prompt in prompts] == [False, False, False, True, True]
