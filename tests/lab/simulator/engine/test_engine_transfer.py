"""KV transfers between engines: pinned blocks, transfers, wrong content, a shared store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_cache import block_hashes
from llmproxy.lab.simulator.engine.kv_store import KvStore
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer, MalformedParamsError, TransferParams
from llmproxy.lab.simulator.engine.profiles import PROFILES
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from tests.lab.simulator.engine.invariants import check_engine

H100 = PROFILES["llama-8b-h100"]
PARAMS = TransferParams(((1, 2),), "300a2ef4", "chatcmpl-mine-8f39cf21", "localhost", 5601, 1968, 16)


def wanted(
    name: str, prompt: int, output: int = 1, start: int = 0, *, pins: bool = False, remote: bool = False
) -> EngineRequest:
    """Prompts with one `start` share their blocks."""
    tokens = range(start, start + prompt + output)
    return EngineRequest(name, prompt, output, block_hashes(tokens, 16), pins=pins, remote=remote)


def run_out(engine: Engine) -> list[tuple[str, int]]:
    """Step until nothing is left to do; the transfers that began."""
    began: list[tuple[str, int]] = []
    while engine.busy:
        began += engine.step().fetches
        check_engine(engine)
    return began


def test_pinned_blocks_stay_in_use_until_they_are_released() -> None:
    engine = Engine(H100, kv_tokens=16 * 11)
    engine.add(wanted("p", 100, pins=True))
    run_out(engine)
    assert engine.gauges().kv_used == 0.7
    assert len(engine.kv.kept["p"].blocks) == 7, "the last block counts, which is not full"
    assert engine.cached_tokens(wanted("again", 100)) == 96
    assert engine.release("p")
    assert engine.gauges().kv_used == 0.0
    assert not engine.release("p"), "one read is all there is"


def test_an_aborted_prefill_pins_nothing() -> None:
    engine = Engine(H100)
    engine.add(wanted("p", 100, 9, pins=True))
    engine.step()
    engine.abort("p")
    assert engine.gauges().kv_used == 0.0
    assert not engine.kv.kept


@pytest.mark.parametrize("ahead", [True, False])
def test_pinned_blocks_hold_up_others_and_the_engine_rests_meanwhile(ahead: bool) -> None:
    engine = Engine(H100, kv_tokens=16 * 11, async_scheduling=ahead)
    engine.add(wanted("p", 100, pins=True))
    engine.add(wanted("next", 100, start=1000))
    run_out(engine)
    assert (engine.gauges().waiting, engine.busy) == (1, False)
    engine.release("p")
    assert engine.busy
    run_out(engine)
    assert engine.gauges().waiting == 0


@pytest.mark.parametrize("ahead", [True, False])
def test_fetched_prompt_computes_its_last_token_alone(ahead: bool) -> None:
    engine = Engine(H100, async_scheduling=ahead)
    engine.add(wanted("d", 100, 3, remote=True))
    assert engine.gauges().to_fetch == 1
    assert run_out(engine) == [("d", 100)]
    gauges = engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.deferred, gauges.fetching) == (0, 1, 1, 1)
    assert gauges.kv_used > 0
    engine.fetched("d")
    assert engine.gauges().fetched == 1
    step = engine.step()
    assert (step.admitted, step.prefill_tokens, step.emitted, step.wrong) == ((("d", 99),), 1, ("d",), ())
    run_out(engine)
    assert (engine.counters.external, engine.counters.prefix_hits) == (100, 0)
    assert engine.cached_tokens(wanted("again", 100)) == 96, "what was fetched is cached as what was computed"


def test_only_what_is_not_cached_is_fetched() -> None:
    engine = Engine(H100)
    engine.add(wanted("earlier", 50))
    run_out(engine)
    engine.add(wanted("d", 100, remote=True))
    assert run_out(engine) == [("d", 100 - 48)]


def test_others_decode_while_a_transfer_runs_and_a_full_batch_begins_none() -> None:
    engine = Engine(H100, max_num_seqs=1)
    engine.add(wanted("runs", 20, 5, start=5000))
    engine.add(wanted("d", 100, remote=True))
    while not (step := engine.step()).fetches:
        assert step.emitted == ("runs",)
    assert not engine.gauges().running
    engine.add(wanted("later", 20, 5, start=9000))
    engine.step()
    engine.fetched("d")
    assert "d" not in engine.step().emitted, "its place is taken"
    run_out(engine)
    assert engine.counters.generation == 11


def test_a_step_that_only_begins_a_transfer_computes_nothing() -> None:
    engine = Engine(H100)
    engine.add(wanted("d", 100, remote=True))
    assert engine.step().duration_s == pytest.approx(H100.overhead_ms / 1000)


def test_kv_that_cannot_be_had_is_computed_here() -> None:
    engine = Engine(H100)
    engine.add(wanted("d", 100, 2, remote=True))
    run_out(engine)
    engine.not_fetched("d")
    assert engine.gauges().kv_used == 0.0
    step = engine.step()
    assert (step.prefill_tokens, step.fetches, step.wrong) == (100, (), ())
    run_out(engine)
    assert engine.counters.external == 0


def test_wrong_kv_poisons_the_cache_until_its_blocks_are_taken() -> None:
    engine = Engine(H100, kv_tokens=16 * 12)
    engine.add(wanted("late", 100, remote=True))
    run_out(engine)
    engine.fetched("late", right=False)
    assert engine.step().wrong == ("late",)
    run_out(engine)
    engine.add(wanted("shares", 150))
    assert engine.step().wrong == ("shares",), "it found blocks under the right name, with wrong content"
    run_out(engine)
    engine.add(wanted("other", 170, start=700))
    assert engine.step().wrong == (), "it shares nothing"
    run_out(engine)
    engine.add(wanted("again", 150))
    step = engine.step()
    assert (step.wrong, step.prefill_tokens) == ((), 150), "what was wrong is gone"


def test_what_is_computed_from_wrong_blocks_is_wrong() -> None:
    engine = Engine(H100)
    engine.add(wanted("late", 32, remote=True))
    run_out(engine)
    engine.fetched("late", right=False)
    run_out(engine)
    engine.add(wanted("longer", 90))
    run_out(engine)
    # All that the late one held is forgotten, and what the longer one computed behind it is not.
    late, longer = (engine._cache.match(wanted("", length).hashes) for length in (32, 90))
    assert len(longer) > len(late)
    assert set(longer[len(late) :]) <= engine.kv._wrong


def test_an_abort_under_a_transfer_frees_its_blocks_at_the_end_of_it() -> None:
    engine = Engine(H100)
    for right in (True, None):
        engine.add(wanted("d", 100, remote=True))
        run_out(engine)
        assert engine.abort("d")
        assert engine.gauges().waiting == 0
        assert engine.gauges().kv_used > 0, "the transfer still writes there"
        engine.not_fetched("d") if right is None else engine.fetched("d", right)
        assert engine.gauges().kv_used == 0.0
        assert not engine.busy
        check_engine(engine)


def test_an_abort_before_its_transfer_begins_frees_its_blocks_at_once() -> None:
    engine = Engine(H100)
    engine.add(wanted("runs", 20, 50, start=5000))
    engine.step()
    engine.add(wanted("d", 100, remote=True))
    engine.step()
    assert engine._ahead is not None
    assert engine._ahead.fetches
    assert engine.abort("d")
    assert engine.step().fetches == ()
    check_engine(engine)


def test_a_planned_transfer_begins_though_all_that_ran_has_left() -> None:
    engine = Engine(H100)
    engine.add(wanted("runs", 20, 50, start=5000))
    engine.step()
    engine.add(wanted("d", 100, remote=True))
    engine.step()
    engine.abort("runs")
    assert engine.busy
    assert engine.step().fetches == (("d", 100),)


def test_what_one_engine_has_stored_another_one_loads(tmp_path: Path) -> None:
    times = KvTransfer(bytes_per_s=1e9)
    first, second = KvStore(tmp_path / "blocks"), KvStore(tmp_path / "blocks")
    prefiller, decoder = Engine(H100, store=(first, times)), Engine(H100, store=(second, times))
    prompt = 1200
    prefiller.add(wanted("p", prompt))
    run_out(prefiller)
    decoder.add(wanted("d", prompt, 4))
    step = decoder.step()
    assert (step.admitted, step.prefill_tokens) == ((("d", 1184),), 16)
    alone = Engine(H100)
    alone.add(wanted("warm", prompt))
    run_out(alone)
    alone.add(wanted("d", prompt, 4))
    assert step.duration_s == pytest.approx(alone.step().duration_s + times.transfer_s(1184))
    run_out(decoder)
    assert (decoder.counters.external, prefiller.counters.external) == (1184, 0)
    # The answer is in no store, only in the cache of its engine.
    prefiller.add(wanted("next", prompt + 160, start=0))
    assert prefiller.step().admitted == (("next", 1200),)


def test_a_store_in_a_file_outlives_its_engines(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    KvStore(path).save([1, -2, 3])
    again = KvStore(path)
    again.save([3, 4])
    assert (again.found([1, -2, 3, 4]), again.found([1, 9, 3]), again.found([9])) == (4, 1, 0)
    assert path.stat().st_size == 8 * 5, "what nobody asked for is not known, and written again"


def test_parameters_have_the_recorded_fields_in_the_recorded_order() -> None:
    assert list(PARAMS.body().items()) == [
        ("do_remote_prefill", True),
        ("do_remote_decode", False),
        ("remote_block_ids", ((1, 2),)),
        ("remote_engine_id", "300a2ef4"),
        ("remote_request_id", "chatcmpl-mine-8f39cf21"),
        ("remote_host", "localhost"),
        ("remote_port", 5601),
        ("tp_size", 1),
        ("dcp_size", 1),
        ("pp_size", 1),
        ("remote_num_tokens", 1968),
        ("remote_blocks_expiry_time", None),
        ("transfer_mode", "pull"),
        ("remote_prefill_cached_tokens", 16),
    ]
    assert TransferParams.read(PARAMS.body() | {"unknown": 1}) == PARAMS


NEEDED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")


@pytest.mark.parametrize("field", NEEDED)
@pytest.mark.parametrize("broken", [False, True])
def test_parameters_without_what_every_version_sent_are_malformed(field: str, broken: bool) -> None:
    body = PARAMS.body()
    if broken and field in ("remote_block_ids", "remote_port", "tp_size"):
        body[field] = "x"
    else:
        del body[field]
    with pytest.raises(MalformedParamsError):
        TransferParams.read(body)


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    times = KvTransfer(bytes_per_token=1000, bytes_per_s=1e6, latency_s=0.01, lease_s=30.0)
    assert times.transfer_s(500) == pytest.approx(0.51)
    assert (times.heartbeat_s, times.extension_s) == (5.0, 20.0)
    with pytest.raises(ValueError, match="above 0"):
        replace(times, lease_s=0.0)


def test_who_has_its_kv_goes_before_one_that_needs_its_blocks() -> None:
    engine = Engine(H100, max_num_seqs=1, kv_tokens=16 * 35, async_scheduling=False)
    engine.add(wanted("small", 1, remote=True))
    engine.add(wanted("large", 1, 529, start=5000))
    engine.step()
    engine.step()
    engine.fetched("small")
    run_out(engine)
    assert engine.counters.generation == 530
    assert not engine.gauges().waiting
