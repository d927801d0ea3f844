"""Kept runs: found again only where everything that they depend on is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lab.scenarios import store
from benchmarks.lab.scenarios.store import Store, code_digest
from benchmarks.lab.scenarios.test_scenarios import made
from llmproxy.config import Config
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.results.result import Point
from llmproxy.lab.run.runs import Simulation
from llmproxy.lab.traces.mix import Mix

GENERATED = Simulation("gen:step_bursts,rate=10", fleet_named("2xllama-8b-h100"), Config())


def test_a_run_is_found_again_as_it_was(tmp_path: Path) -> None:
    kept, one = Store(tmp_path / "runs"), made(Point("cost", 1))
    assert kept.get(GENERATED, one.run.point) is None
    kept.put(GENERATED, one)
    assert kept.get(GENERATED, one.run.point) == one
    assert Store(tmp_path / "runs").get(GENERATED, one.run.point) == one


def other_config(**given: object) -> Simulation:
    return replace(GENERATED, config=Config.model_validate({"scheduling": given}))


@pytest.mark.parametrize(
    "other",
    [
        replace(GENERATED, fleet=fleet_named("3xllama-8b-h100")),
        replace(GENERATED, fleet=replace(GENERATED.fleet, proxies=2)),
        other_config(look_ahead=0),
        other_config(flow="header:x-tenant"),
        replace(GENERATED, trace="gen:step_bursts,rate=11"),
        replace(GENERATED, skip=1),
        replace(GENERATED, requests=10),
        replace(GENERATED, replicate=2),
        replace(GENERATED, warmup=0.1),
        replace(GENERATED, mix=Mix(band="critical")),
    ],
)
def test_a_run_of_anything_else_is_not_found(tmp_path: Path, other: Simulation) -> None:
    kept, one = Store(tmp_path), made(Point("cost", 1))
    kept.put(GENERATED, one)
    assert kept.get(other, one.run.point) is None


@pytest.mark.parametrize(
    "other",
    [Point("random", 1), Point("cost", 2), Point("cost", 1, 2.0), Point("cost", 1, 1.0, 1.9)],
)
def test_a_run_of_another_point_is_not_found(tmp_path: Path, other: Point) -> None:
    kept = Store(tmp_path)
    kept.put(GENERATED, made(Point("cost", 1)))
    assert kept.get(GENERATED, other) is None


def test_a_run_of_another_file_or_another_code_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    for path, text in zip(files, ("same", "same", "other"), strict=True):
        path.write_text(text)
    kept, one = Store(tmp_path / "runs"), made(Point("cost", 1))
    kept.put(replace(GENERATED, trace=str(files[0])), one)
    found = [kept.get(replace(GENERATED, trace=str(path)), one.run.point) for path in files]
    assert found == [one, one, None]
    monkeypatch.setattr(store, "code_digest", lambda rivals: f"changed {rivals}")
    assert kept.get(replace(GENERATED, trace=str(files[0])), one.run.point) is None


def test_digest_covers_code_of_runs_and_not_presentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llmproxy"
    names = (
        "core/queue.py",
        "config/load.py",
        "lab/simulator/engine/engine.py",
        "lab/run/replay.py",
        "scheduling/lease.py",
    )
    rival, shown = "lab/baselines/endpoint_picker.py", "lab/results/plots.py"
    for name in (*names, rival, shown):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("before")
    monkeypatch.setattr(store, "PACKAGE", package)

    def digests_with(changed: str) -> tuple[str, str]:
        (package / changed).write_text("after")
        code_digest.cache_clear()
        digests = code_digest(False), code_digest(True)
        (package / changed).write_text("before")
        return digests

    try:
        before = digests_with(shown)
        for name in names:
            assert all(a != b for a, b in zip(digests_with(name), before, strict=True)), name
        ours, theirs = digests_with(rival)
        assert (ours == before[0], theirs == before[1]) == (True, False)
    finally:
        code_digest.cache_clear()


def test_a_run_that_was_half_written_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, one = Store(tmp_path), made(Point("cost", 1))

    def half(path: Path, data: bytes) -> int:
        path.open("wb").close()
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(Path, "write_bytes", half)
        with pytest.raises(KeyboardInterrupt):
            kept.put(GENERATED, one)
    assert len(list(tmp_path.iterdir())) == 1
    assert kept.get(GENERATED, one.run.point) is None
    kept.put(GENERATED, one)
    assert kept.get(GENERATED, one.run.point) == one
