"""The report of a shadow: its engines are as fast as the measured ones, and it has all tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from llmproxy.config import Config
from llmproxy.lab import results, shadow
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.results.result import Point, SimulationResult
from llmproxy.lab.run.runs import Simulation
from llmproxy.lab.shadow import predict
from llmproxy.lab.simulate import Unusable
from llmproxy.lab.simulator.engine.profiles import PROFILES
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import fleet, records_of, setup, traffic


def record(folder: Path, arrivals: Sequence[Arrival] = (), late_s: float = 0.0) -> None:
    """Writes the record of a shadow in front of a simulated fleet, whose HTTP takes `late_s` longer."""
    on = fleet(2)
    late = [
        replace(one, profile=replace(one.profile, frontend_s=one.profile.frontend_s + late_s)) for one in on.replicas
    ]
    on = replace(on, replicas=tuple(late))
    lines = [
        {
            "at_s": one.arrived_s, "outcome": one.outcome.value, "status": 200, "model": "m",
            "stream": not one.arrival.whole, "tenant": one.arrival.tenant, "prompt_tokens": one.arrival.prompt_tokens,
            "output_tokens": one.output_tokens, "duration_s": one.ended_s - one.arrived_s, "ttft_s": one.ttft_s,
            "tpot_s": one.tpot_s, "blocks": one.arrival.blocks,
        }
        for one in records_of(setup(arrivals or traffic(60, rate=20.0), "round_robin", on))
    ]  # fmt: skip
    lines = [{name: value for name, value in line.items() if value is not None} for line in lines]
    header = {"llmproxy_decisions": 1, "wall_time": "2026-11-21T10:00:00+00:00", "block_tokens": 64}
    text = "".join(json.dumps(line) + "\n" for line in [header, *lines])
    (folder / "requests.jsonl").write_text(text + '{"at_s": 4')
    facts = [
        {
            "name": spec.name, "kv_tokens": spec.kv_tokens, "max_model_len": spec.max_model_len,
            "batch_limit": spec.max_num_seqs, "batch_seen": None, "requests": 60.0, "running_mean": 3.0,
            "waiting_mean": 0.0, "queried_tokens": 1000.0, "hit_tokens": 100.0,
        }
        for spec in on.replicas
    ]  # fmt: skip
    (folder / "replicas.json").write_text(json.dumps(facts))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates less, and draws nothing."""
    few = {name: PROFILES[name] for name in ("llama-8b-h100", "llama-70b-a100-tp4")}
    monkeypatch.setattr(shadow, "PROFILES", few)
    monkeypatch.setattr(shadow, "PREFILL_SCALES", (1.0, 2.0))
    monkeypatch.setattr(shadow, "SIZES", ())
    # To draw takes a while.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("plots", "drawing"):
        monkeypatch.delitem(sys.modules, f"llmproxy.lab.results.{name}", raising=False)
        monkeypatch.delattr(results, name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_report_fits_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    config_file = tmp_path / "my config.yaml"
    predict(tmp_path, Config(), "round_robin", workers=1, config_file=config_file)
    assert f"--config '{config_file}' --prefill-scale" in capsys.readouterr().out
    result = SimulationResult.model_validate_json((tmp_path / "result.json").read_bytes())
    assert result.config["queue_max_wait_s"] == Config().queue.max_wait_s
    runs = {run.policy: run for run in result.runs}
    measured, before = runs["measured"], runs["round_robin, simulated"]
    after = runs["llmproxy (cost), simulated"]
    assert measured.offered == before.offered == after.offered == 60
    for one, other in ((measured.tpot_s, before.tpot_s), (measured.ttft_s, before.ttft_s)):
        assert one.p50 is not None
        assert other.p50 == pytest.approx(one.p50, rel=0.1)
    report = (tmp_path / "report.html").read_text()
    for title in ("By band", "By tenant", "Balance and caches", "Replicas", "This prediction cannot know"):
        assert title in report
    assert "The row measured has the times of your clients" in report
    assert "no GPU was run" not in report
    assert [spec.name for spec in fleet_named(str(tmp_path / "fleet.yaml")).replicas] == ["gpu-0", "gpu-1"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_slow_way_to_the_engines_is_no_slow_prompt(tmp_path: Path) -> None:
    tenants = [(f"of {prompt}", prompt) for prompt in (200, 1200)]
    arrivals = [
        replace(one, tenant=tenants[number % 2][0], prompt_tokens=tenants[number % 2][1], blocks=())
        for number, one in enumerate(traffic(60, rate=2.0))
    ]
    record(tmp_path, arrivals, late_s=0.1)
    predict(tmp_path, Config(), "round_robin", workers=1)
    result = SimulationResult.model_validate_json((tmp_path / "result.json").read_bytes())
    runs = {run.policy: run.by_tenant for run in result.runs}
    for tenant, _ in tenants:
        expected = runs["measured"][tenant].ttft_s.p50
        assert runs["round_robin, simulated"][tenant].ttft_s.p50 == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_whole_answers_do_not_slow_down_the_first_tokens_of_streams(tmp_path: Path) -> None:
    arrivals = [
        replace(one, tenant="one", prompt_tokens=4_000 if number % 2 else 200, whole=bool(number % 2), blocks=())
        for number, one in enumerate(traffic(60, rate=2.0))
    ]
    record(tmp_path, arrivals)
    predict(tmp_path, Config(), "round_robin", workers=1)
    result = SimulationResult.model_validate_json((tmp_path / "result.json").read_bytes())
    runs = {run.policy: run for run in result.runs}
    measured, simulated = runs["measured"], runs["round_robin, simulated"]
    assert simulated.ttft_s.p95 == pytest.approx(measured.ttft_s.p95, rel=0.1)
    assert simulated.e2e_s.p95 == pytest.approx(measured.e2e_s.p95, rel=0.1)
    assert simulated.prefill_scale == 1.0
    assert "llama-8b-h100" in str(result.config["fleet"])


def test_the_profile_of_no_real_model_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(tasks: Sequence[tuple[Simulation, Point]], _: int | None) -> NoReturn:
        raise Unusable(" ".join(simulation.fleet.replicas[0].profile_name for simulation, _ in tasks))

    monkeypatch.setattr(shadow, "run_all", tried)
    record(tmp_path)
    with pytest.raises(Unusable) as refused:
        predict(tmp_path, Config(), "round_robin")
    assert str(refused.value).split() == [name for name in PROFILES if name != "tiny"]


def test_simulations_read_only_the_last_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(tasks: Sequence[tuple[Simulation, Point]], _: int | None) -> NoReturn:
        (trace,) = {simulation.trace for simulation, _ in tasks}
        raise Unusable(str(len(Path(trace).read_text().splitlines())))

    monkeypatch.setattr(shadow, "REQUESTS_MAX", 40)
    monkeypatch.setattr(shadow, "run_all", read)
    record(tmp_path)
    with pytest.raises(Unusable, match=r"^41$"):
        predict(tmp_path, Config(), "round_robin")


def test_a_record_without_streams_has_no_speed(tmp_path: Path) -> None:
    record(tmp_path)
    file = tmp_path / "requests.jsonl"
    file.write_text(file.read_text().replace('"tpot_s"', '"other"'))
    with pytest.raises(Unusable, match="no stream that was completed"):
        predict(tmp_path, Config(), "round_robin")


def test_an_empty_record(tmp_path: Path) -> None:
    (tmp_path / "replicas.json").write_text("[]")
    (tmp_path / "requests.jsonl").write_text("")
    with pytest.raises(Unusable, match="nothing to report on"):
        predict(tmp_path, Config(), "round_robin")
