"""The page of the queue, and the decision log and its replay."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from llmproxy import process
from llmproxy.cli import commands as cli
from llmproxy.config import Config, ConfigError, hash_of
from llmproxy.lab.results.result import SimulationResult
from llmproxy.lab.run import runs
from llmproxy.lab.traces import open_trace, survey
from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, decisions, serving, until

QUEUE = "/debug/queue"
EXPLAIN = "/debug/explain"
OBJECTIVE = "x-llm-d-inference-objective"
FLOW = "x-llm-d-inference-fairness-id"
ACME = {"authorization": "Bearer acme-key"}
TENANTS: dict[str, Any] = {
    "tenants": [{"name": "acme", "keys": [hash_of("acme-key")], "limits": {"in_flight": 1}, "trusted": True}],
    "api_keys": ["plain"],
}
ONE_SEAT: dict[str, Any] = {"fixed_limit": 1, "scheduling": {"look_ahead": 0}}


async def test_the_page_shows_waiting_requests_and_free_places() -> None:
    async with serving(FAST, **ONE_SEAT) as proxy:
        async with proxy.stream() as seat:
            await seat.content.readany()
            waiting = [
                await proxy.enter("late", **{OBJECTIVE: "sheddable", FLOW: "blue"}),
                await proxy.enter("a1", HELLO | {"model": "lora-0"}),
                await proxy.enter("a2", HELLO | {"model": "lora-0"}),
                await proxy.enter("now", **{OBJECTIVE: "critical", "x-slo-ttft-ms": "60000"}),
            ]
            answer = await proxy.get(QUEUE)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            (pool,) = answer.json["pools"]
            assert (pool["pool"], pool["alive"], pool["held"], pool["in_flight"]) == ("base", True, False, 1)
            shown = {
                band["band"]: [(f["flow"], f["waiting"], f["head"]["request"]) for f in band["flows"]]
                for band in pool["bands"]
            }
            assert shown == {
                "critical": [("base", 1, "now")],
                "default": [("lora-0", 2, "a1")],
                "sheddable": [("blue", 1, "late")],
            }
            (head,) = [flow["head"] for band in pool["bands"] for flow in band["flows"] if band["band"] == "critical"]
            assert 0 <= head["age_s"] < 60 < head["age_s"] + head["left_s"] + 1
            assert head["slack_s"] < 60
            (backend,) = pool["backends"]
            assert (backend["backend"], backend["load"], backend["limit"]) == ("b0", 1, 1)
            assert backend["room_for"] == []
            position = (await proxy.get(f"{QUEUE}?request=a2")).json
            assert (position["band"], position["flow"]) == ("default", "lora-0")
            assert (position["ahead_in_higher_bands"], position["ahead_in_flow"]) == (1, 1)
            assert (await proxy.get(f"{QUEUE}?request=gone")).status == 404
        await asyncio.gather(*waiting)
        (pool,) = (await proxy.get(QUEUE)).json["pools"]
        assert all(band["flows"] == [] for band in pool["bands"])
        assert pool["backends"][0]["room_for"] == ["critical", "default", "sheddable"]


async def test_a_request_that_waits_for_its_tenants_limit_says_so() -> None:
    async with serving(FAST, FAST, **TENANTS) as proxy:
        async with proxy.stream(**ACME) as seat:
            await seat.content.readany()
            task = await proxy.enter("blocked", **ACME)
            await until(lambda: proxy.app.pools.blocked())
            page = (await proxy.get(QUEUE)).json
            assert page["usage_limits"] == [
                {"limit": "tenant:acme", "in_flight": 1, "in_flight_max": 1, "requests_left": None, "tokens_left": None}
            ]
            blocked = {band["band"]: band["blocked"] for band in page["pools"][0]["bands"]}
            assert blocked["default"] == {"tenant:acme": 1}
            assert (await proxy.get(f"{QUEUE}?request=blocked")).json["blocked_by"] == "tenant:acme"
            assert proxy.metric("llmproxy_blocked_requests", limit="tenant:acme") == 1
        assert (await task).status == 200
        assert proxy.metric("llmproxy_blocked_requests") == 0
        await proxy.settled()
        assert proxy.metric("llmproxy_tenant_requests_total", tenant="acme", outcome="completed") == 1


async def test_requests_held_for_an_unknown_model_are_counted() -> None:
    async with serving(wait=False, extra=["http://127.0.0.1:9"], queue={"no_backend_wait_s": 30.0}) as proxy:
        held = proxy.waiting()
        await until(lambda: proxy.app.dispatcher.nameless == 1)
        page = (await proxy.get(QUEUE)).json
        assert (page["nameless"], page["pools"]) == (1, [])
        held.cancel()
        await until(lambda: proxy.app.dispatcher.nameless == 0)


async def test_a_choice_is_shown_with_prices_and_predictions(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with serving(FAST, FAST, scheduling={"placement": "cost"}, decision_log=str(path)) as proxy:
        answers = {}
        for name, change in (("first", {"max_tokens": 30}), ("second", {"n": 2}), ("plain", {"stream": False})):
            answers[name] = await proxy.post(CHAT, STREAM | change, headers={"x-request-id": name})
        explained = (await proxy.get(f"{EXPLAIN}?request=first")).json
        (pool,) = explained["pools"]
        (choice,) = pool["choices"]
        chosen, other = choice["candidates"]
        assert (explained["placement"], pool["pool"], pool["priced"]) == ("cost", "base", True)
        assert (choice["request"], choice["model"], choice["chosen"]) == ("first", "base", answers["first"].backend)
        assert {chosen["backend"], other["backend"]} == {"b0", "b1"}
        assert (chosen["backend"], chosen["price"].split()[0]) == (choice["chosen"], f"{chosen['total_s']:.3f}")
        # In the order in which they were first read.
        assert sorted(backend["backend"] for backend in pool["learned"]["backends"]) == ["b0", "b1"]
        assert [one["request"] for one in (await proxy.get(f"{EXPLAIN}?limit=2")).json["pools"][0]["choices"]] == [
            "plain",
            "second",
        ]
        await proxy.settled()
        for time, count in (("ttft", 2), ("tpot", 1)):
            assert proxy.metric("llmproxy_prediction_error_ratio_count", time=time) == count
            assert proxy.metric("llmproxy_prediction_seconds_total", time=time, kind="observed") > 0
    lines = decisions(path)
    first = lines["first"]
    assert first["predicted"]["ttft_s"] == chosen["ttft_s"] < first["predicted"]["ttft_p90_s"]
    assert first["predicted"]["tpot_s"] == chosen["tpot_s"] < first["predicted"]["tpot_p90_s"]
    assert first["predicted"]["cached_tokens"] == chosen["cached_tokens"]
    assert "tpot_s" not in lines["second"]["predicted"], "the tokens of two sequences come mixed"
    assert "tpot_s" in lines["plain"]["predicted"]
    assert sum(one.output_tokens for one in open_trace(path).arrivals()) == 30 + 8 + 4


async def test_an_unknown_objective_is_counted() -> None:
    async with serving(FAST) as proxy:
        assert (await proxy.chat(headers={OBJECTIVE: "gold"})).status == 200
        await proxy.settled()
        assert proxy.metric("llmproxy_unknown_objectives_total") == 1
        assert proxy.metric("llmproxy_requests_total", band="default") == 1


# --- the decision log -------------------------------------------------------------------------------------------------


async def test_a_decision_log_has_the_order_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with serving(FAST, **ONE_SEAT, decision_log=str(path)) as proxy:
        async with proxy.stream() as seat:
            await seat.content.readany()
            waiting = [
                await proxy.enter("third", **{OBJECTIVE: "sheddable"}),
                await proxy.enter("second", **{"x-llm-d-inference-ttl": "30s"}),
                await proxy.enter("first", **{OBJECTIVE: "critical", "x-slo-ttft-ms": "60000"}),
            ]
        await asyncio.gather(*waiting)
        assert (await proxy.chat(HELLO | {"model": "nobody"})).status == 404
    lines = decisions(path)
    assert len(lines) == 4, "a request for a model that nobody serves never came to the waiting room"
    granted = sorted(lines.values(), key=lambda line: line["granted_at_s"])
    assert [line["request_id"] for line in granted][1:] == ["first", "second", "third"]
    why = [lines[name]["why"]["waiting"] for name in ("first", "second", "third")]
    assert why == [{"100": 1, "0": 1, "-100": 1}, {"0": 1, "-100": 1}, {"-100": 1}]
    first = lines["first"]
    assert (first["band"], first["criticality"], first["outcome"], first["backend"]) == (
        "critical", 100, "completed", "b0"
    )  # fmt: skip
    assert first["at_s"] <= first["granted_at_s"] <= first["ended_at_s"]
    assert first["output_tokens"] == 4
    assert (first["ttft_slo_s"], first["met"]) == (60.0, True)
    assert (lines["second"]["max_wait_s"], "met" in lines["second"]) == (30.0, False)
    assert set(first["placement"]) >= {"queue", "prefill"}
    assert first["predicted"]["ttft_s"] > 0.0
    assert granted[0]["outcome"] == "cancelled"
    assert "output_tokens" not in granted[0]


async def test_a_request_that_gave_its_backend_up_says_so(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with serving(FAST, **ONE_SEAT, decision_log=str(path)) as proxy:
        proxy.replicas[0].faults.set("frozen")
        sheddable = proxy.waiting(STREAM, **{OBJECTIVE: "sheddable", "x-request-id": "sheddable"})
        await until(lambda: proxy.app.dispatcher.leases)
        critical = proxy.waiting(STREAM, **{OBJECTIVE: "critical", "x-request-id": "critical"})
        await until(lambda: proxy.app.pools.position("sheddable", 0.0))
        proxy.replicas[0].faults.clear()
        await asyncio.gather(sheddable, critical)
        await proxy.settled()
        assert proxy.metric("llmproxy_preemptions_total", band="sheddable") == 1
    lines = decisions(path)
    assert (lines["sheddable"]["preemptions"], lines["sheddable"]["attempts"]) == (1, 2)
    assert lines["critical"]["preemptions"] == 0
    assert lines["critical"]["granted_at_s"] <= lines["sheddable"]["granted_at_s"]


@pytest.mark.slow
async def test_a_day_in_the_log_is_replayed_against_another_policy(tmp_path: Path) -> None:
    path, out = tmp_path / "decisions.jsonl", tmp_path / "out"
    runs._prepared.cache_clear()
    config = ONE_SEAT | TENANTS | {"queue": {"requests_max": 2}, "decision_log": str(path)}
    async with serving(FAST, **config) as proxy:
        key = {"authorization": "Bearer plain"}
        async with proxy.stream(**key) as seat:
            await seat.content.readany()
            waiting = [
                await proxy.enter(
                    "acme", HELLO | {"model": "lora-0", "max_tokens": 6}, **ACME, **{OBJECTIVE: "critical"}
                ),
                await proxy.enter("plain", HELLO | {"max_tokens": 2}, **key),
            ]
            refused = await proxy.chat(headers=key | {"x-request-id": "refused"})
            assert refused.status == 429
        await asyncio.gather(*waiting)
    assert next(iter(decisions(path))) == "refused", "lines come in the order of the ends"
    arrivals = list(open_trace(path).arrivals())
    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)
    # Requests of the same millisecond are in the order of their ends.
    replayed = sorted((one.tenant, one.adapter or "", one.band, one.output_tokens, one.guessed) for one in arrivals)
    assert replayed == [
        ("acme", "lora-0", 100, 6, False),
        ("base", "", 0, 2, False),
        ("base", "", 0, 2, True),
        ("base", "", 0, 2, True),
    ]
    assert survey(open_trace(path)).guessed == 2
    command = ["simulate", "--trace", str(path), "--fleet", "1xtiny", "--workers", "1", "--no-oracle"]
    command += ["--out", str(out), "--policy", "blend", "--policy", "blend(fairness=fcfs)"]
    ran = await asyncio.to_thread(CliRunner().invoke, cli.app, command)
    assert ran.exit_code == 0, ran.output
    assert "2 of 4 requests got no answer when the trace was taken" in ran.output
    result = SimulationResult.model_validate_json((out / "result.json").read_bytes())
    assert result.config["answers_guessed"] == 2
    assert {run.policy for run in result.runs} == {"blend", "blend(fairness=fcfs)"}


async def test_a_decision_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decision_log: .*missing/log cannot be written: No such file"):
        async with serving(FAST, decision_log=str(tmp_path / "missing" / "log")):
            pass


def test_the_program_ends_with_2_then(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = {"host": "127.0.0.1", "port": 0, "backends": ["http://127.0.0.1:9"], "decision_log": str(tmp_path)}
    handlers = logging.getLogger().handlers[:]
    try:
        assert process.run(Config.model_validate(config)) == 2
    finally:
        logging.getLogger().handlers[:] = handlers
        structlog.reset_defaults()
    assert f"decision_log: {tmp_path} cannot be written" in capfd.readouterr().err
