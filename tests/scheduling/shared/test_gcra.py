"""The script in a real server: it matches the local token bucket, its keys expire, and it survives wrong values."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from llmproxy.core.token_bucket import TokenBucket
from llmproxy.scheduling import gcra
from llmproxy.scheduling.gcra import DEBT_MAX_S, SCRIPT, parse_result, script_arguments
from llmproxy.scheduling.valkey import StoreError, ValkeyServer
from tests.scheduling.shared.servers import Server, needs_server, serving_store

pytestmark = needs_server

KEY = b"llmproxy:{test}:tokens:tenant:acme"
OTHER = b"llmproxy:{test}:requests:tenant:acme"
MINUTE_S = 60.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving_store(Server(tmp_path)) as one:
        yield one


@pytest.fixture
async def store(server: Server) -> AsyncIterator[ValkeyServer]:
    one = ValkeyServer(server.url, "shared_limits.store", 5.0)
    yield one
    await one.close()


async def ask(store: ValkeyServer, *asks: list[tuple[bytes, float]], **corrections: float) -> list[tuple[float, int]]:
    """Corrections by `key` and `other`."""
    named = {"key": KEY, "other": OTHER}
    keys, given = script_arguments(asks, {named[name]: seconds for name, seconds in corrections.items()})
    return parse_result(await store.run(SCRIPT, keys, *given), len(asks))


async def left_ms(store: ValkeyServer, key: bytes = KEY) -> int:
    """How long a key stays; -2 where there is none."""
    found = await store.client.pttl(key)
    assert isinstance(found, int)
    return found


# --- counting ---------------------------------------------------------------------------------------------------------


async def test_shared_rate_counts_like_the_bucket_of_one_proxy(store: ValkeyServer) -> None:
    """By a clock that is set, with costs above the burst, and with more given back than was taken."""
    by_set_clock = SCRIPT.replace("redis.call('TIME')", "{1767225600 + ARGV[4], 0}")
    by_set_clock = by_set_clock.replace("'PX', string.format('%.0f', math.ceil(left * 1000))", "'EX', 1000")
    assert "ARGV[4]" in by_set_clock
    assert "'EX'" in by_set_clock
    random = Random(7)
    now, per_s, refused = 1_000_000, 2.0, 0
    bucket = TokenBucket(per_s * MINUTE_S, per_s)
    for _ in range(400):
        now += random.choice((0, 0, 1, 7))
        amount = float(random.choice((1, 2, 10, 40, 119, 120, 121, 500)))
        if random.random() < 0.3:
            change = float(random.choice((-500, -40, -1, 3, 60)))
            keys, given = script_arguments((), {KEY: change / per_s})
            await store.run(by_set_clock, keys, *given, now)
            bucket.take(change, now)
        keys, given = script_arguments([[(KEY, amount / per_s)]], {})
        ((wait_s, _),) = parse_result(await store.run(by_set_clock, keys, *given, now), 1)
        assert wait_s == pytest.approx(bucket.wait_s(amount, now), abs=0.0011)
        refused += not bucket.try_take(amount, now)
    assert 50 < refused < 350


async def test_a_minute_is_taken_at_once_and_no_more(store: ValkeyServer) -> None:
    said = await ask(store, *[[(KEY, 6.0)]] * 12)
    assert [wait_s for wait_s, _ in said[:10]] == [0.0] * 10
    assert [wait_s for wait_s, _ in said[10:]] == [pytest.approx(6.0, abs=0.01)] * 2


async def test_a_cost_above_the_burst_passes_when_all_is_there_and_is_paid_back(store: ValkeyServer) -> None:
    assert await ask(store, [(KEY, 600.0)]) == [(0.0, -1)]
    ((wait_s, _),) = await ask(store, [(KEY, 600.0)])
    assert wait_s == pytest.approx(600.0, abs=1.0)


async def test_no_rate_is_taken_where_one_of_several_is_used_up(store: ValkeyServer) -> None:
    await ask(store, [(OTHER, 60.0)])
    said = await ask(store, [(KEY, 30.0), (OTHER, 1.0)], [(KEY, 60.0)])
    assert said[0][0] == pytest.approx(1.0, abs=0.1)
    assert [longest for _, longest in said] == [1, -1], "the place of the rate that says so"


async def test_more_given_back_than_was_taken_is_not_kept(store: ValkeyServer) -> None:
    await ask(store, [(KEY, 10.0)])
    await ask(store, key=-1000.0)
    assert await left_ms(store) == -2
    said = await ask(store, *[[(KEY, 30.0)]] * 3, key=-1000.0)
    assert [wait_s > 0 for wait_s, _ in said] == [False, False, True]


async def test_corrections_count_before_new_requests(store: ValkeyServer) -> None:
    await ask(store, [(KEY, 60.0)])
    assert await ask(store, [(KEY, 60.0)], key=-60.0) == [(0.0, -1)]
    ((wait_s, _),) = await ask(store, [(KEY, 1.0)], key=60.0)
    assert wait_s == pytest.approx(61.0, abs=1.0)


# --- what stays -------------------------------------------------------------------------------------------------------


async def test_a_key_ends_when_all_that_was_taken_is_back(store: ValkeyServer) -> None:
    await ask(store, [(KEY, 0.02), (OTHER, 30.0)])
    assert 29_000 < await left_ms(store, OTHER) <= 30_001
    async with asyncio.timeout(10):
        while await store.client.exists(KEY):  # noqa: ASYNC110 - it ends in another process
            await asyncio.sleep(0.005)


async def test_a_debt_lasts_a_day_at_most(store: ValkeyServer) -> None:
    await ask(store, [(KEY, 1e9)])
    assert 1000 * (DEBT_MAX_S - 10) < await left_ms(store) <= 1000 * DEBT_MAX_S
    ((wait_s, _),) = await ask(store, [(KEY, 1.0)], key=-3600.0)
    assert wait_s == pytest.approx(DEBT_MAX_S - 3600.0 - 59.0, abs=10.0)


async def test_small_parts_add_up(store: ValkeyServer) -> None:
    """A client that comes when due is not refused for a rounding, and a small cost is not rounded away."""
    frozen = SCRIPT.replace("redis.call('TIME')", "{'1900000000', '123456'}")
    for parts in (3, 7, 11, 49, 97, 600, 700, 1100):
        keys, given = script_arguments([[(KEY, MINUTE_S / parts)]] * parts, {})
        assert parse_result(await store.run(frozen, keys, *given), parts) == [(0.0, -1)] * parts
        await store.client.flushall()
    await store.run(frozen, [KEY], *script_arguments([[(KEY, 30.0)]], {})[1])
    before = float(await store.client.get(KEY))
    await store.run(frozen, [KEY], *script_arguments([[(KEY, 1e-7)]] * 20_000, {})[1])
    assert float(await store.client.get(KEY)) - before == pytest.approx(0.002, rel=0.05)


async def test_a_refused_request_leaves_nothing(store: ValkeyServer) -> None:
    await ask(store, [(KEY, 60.0)])
    await ask(store, [(OTHER, 1.0), (KEY, 60.0)])
    assert await store.client.keys("*") == [KEY]


async def test_thousands_of_tenants_have_a_key_each_and_no_more(store: ValkeyServer) -> None:
    def key(tenant: int) -> bytes:
        return f"llmproxy:{{test}}:tokens:tenant:{tenant}".encode()

    for start in range(0, 5000, 250):
        said = await ask(store, *[[(key(tenant), 60.0)] for tenant in range(start, start + 250)])
        assert said == [(0.0, -1)] * 250
    assert await store.client.dbsize() == 5000
    ((wait_s, _),) = await ask(store, [(key(4999), 1.0)])
    assert wait_s > 0


# --- wrong values in the store ----------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "value", [b"", b"garbage", b"nan", b"inf", b"-inf", b"1e300", b"1e10", b"0x", b"\xff\x00", b"-5"]
)
async def test_text_that_is_no_moment_counts_as_nothing_and_is_replaced(store: ValkeyServer, value: bytes) -> None:
    await store.client.set(KEY, value)
    said = await ask(store, [(KEY, 60.0)], [(KEY, 60.0)])
    assert [wait_s > 0 for wait_s, _ in said] == [False, True]
    assert 50_000 < await left_ms(store) <= 60_001


async def test_a_key_of_another_type_counts_as_nothing_and_is_replaced(store: ValkeyServer) -> None:
    await store.client.rpush(KEY, "a")
    said = await ask(store, [(KEY, 60.0)], [(KEY, 60.0)])
    assert [wait_s > 0 for wait_s, _ in said] == [False, True]


async def test_a_server_that_does_not_write_is_an_error(server: Server, store: ValkeyServer) -> None:
    await store.client.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match=str(server.port)):
        await ask(store, [(KEY, 60.0)])


async def test_a_server_that_was_killed_knows_nothing_and_goes_on(server: Server, store: ValkeyServer) -> None:
    await ask(store, [(KEY, 60.0)])
    await server.kill()
    with pytest.raises(StoreError):
        await ask(store, [(KEY, 60.0)])
    await server.start()
    assert await ask(store, [(KEY, 60.0)]) == [(0.0, -1)]


async def test_late_answer_is_not_read_as_the_answer_to_a_later_question(server: Server, store: ValkeyServer) -> None:
    await ask(store, [(KEY, 60.0)])
    server.send(signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(store, [(KEY, 1.0)], [(KEY, 1.0)])
    finally:
        server.send(signal.SIGCONT)
    assert len(await ask(store, [(OTHER, 1.0)])) == 1


@pytest.mark.parametrize("said", [None, b"OK", [], [0], [0, 0, 0], [b"0", b"0"], [[0, 0]]])
def test_an_answer_of_another_kind_is_an_error(said: object) -> None:
    with pytest.raises(StoreError):
        gcra.parse_result(said, 1)
