"""`llmproxy simulate` on the command line: its files and tables, and its messages for invalid options."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llmproxy.cli import commands as cli
from llmproxy.config.value_types import hash_of
from llmproxy.lab.results.result import Point, SimulationResult, load_label
from llmproxy.lab.run import runs

FLEET = "2xtiny"


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLMPROXY_")]:
        monkeypatch.delenv(name)
    # A test must not get the cached trace of another test's file at the same path.
    runs._prepared.cache_clear()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(tmp_path / "tiny.jsonl", [request(i / 5) for i in range(20)])


def request(at_s: float, **given: object) -> dict[str, object]:
    return {"at_s": at_s, "prompt_tokens": 200, "output_tokens": 10, "tenant": f"t{round(at_s * 5) % 3}", **given}


def write(path: Path, lines: list[dict[str, object]]) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def simulate(trace: str, *more: str, fleet: str = FLEET) -> Result:
    return CliRunner().invoke(cli.app, ["simulate", "--trace", trace, "--fleet", fleet, "--workers", "1", *more])


def result_in(out: Path) -> SimulationResult:
    return SimulationResult.model_validate_json((out / "result.json").read_bytes())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place to write, without matplotlib: to draw a report takes a while."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("plots", "drawing"):
        monkeypatch.delitem(sys.modules, f"llmproxy.lab.results.{name}", raising=False)
        monkeypatch.delattr(f"llmproxy.lab.results.{name}", raising=False)
    return tmp_path


# --- files and tables -------------------------------------------------------------------------------------------------


def test_it_prints_tables_and_writes_a_result_and_a_report(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    done = simulate(trace, "--policy", "blend", "--policy", "random", "--seeds", "2", "--out", str(out))
    assert (done.exit_code, done.stderr) == (0, "")
    for word in ("blend", "random", "oracle", f"wrote {out / 'result.json'}", f"wrote {out / 'report.html'}"):
        assert word in done.stdout
    result = result_in(out)
    assert [one.point for one in result.runs] == [
        Point(policy, seed, 1.0, 1.0) for policy in ("blend", "oracle", "random") for seed in (1, 2)
    ]
    assert {(one.offered, one.completed, one.goodput) for one in result.runs} == {(20, 20, 1.0)}
    assert {tuple(one.by_tenant) for one in result.runs} == {("t0", "t1", "t2")}
    assert {tuple(one.by_backend) for one in result.runs} == {("gpu-0", "gpu-1")}
    assert list(result.bounds) == [load_label(1.0, 1.0)]
    html = (out / "report.html").read_text()
    assert html.startswith("<!DOCTYPE html>")
    assert "tiny.jsonl on 2xtiny" in html


def test_it_tells_what_was_simulated(trace: str, folder: Path) -> None:
    simulate(trace, "--proxies", "2", "--skip", "3", "--requests", "10", "--first-seed", "5", "--out", str(folder))
    config = result_in(folder).config
    facts = {"trace": "tiny.jsonl", "fleet": FLEET, "replicas": 2, "proxies": 2, "skip": 3, "requests": 10}
    assert facts.items() <= config.items()
    assert config["seeds"] == [5]
    scheduling, policies = config["scheduling"], config["policies"]
    assert isinstance(scheduling, dict)
    assert isinstance(policies, dict)
    assert scheduling["flow"] == "header:x-tenant"
    assert list(policies) == ["cost", "oracle"]
    assert not {"objective", "scale", "fleet_size"} & config.keys()
    assert str(folder) not in (folder / "result.json").read_text()


def test_it_tells_what_replaced_the_defaults(trace: str, folder: Path) -> None:
    tenant = f"{{name: acme, keys: ['{hash_of('acme')}'], weight: 3.0, cache_salt: private-salt-of-acme}}"
    (folder / "llmproxy.yaml").write_text(f"""
        tenants: [{tenant}]
        queue: {{max_wait_s: 7}}
        backends: [{{url: "http://private:1", name: gpu-0, max_in_flight: 3, api_key: private}}]
    """)
    flags = ("--config", str(folder / "llmproxy.yaml"), "--no-oracle", "--objective", "ttft=5s", "--out", str(folder))
    assert simulate(trace, *flags, "--fleet-size", "1,2").exit_code == 0
    config = result_in(folder).config
    assert (config["objective"], config["fleet_size"]) == ("ttft=5s", "1,2")
    assert config["max_in_flight"] == {"gpu-0": 3}
    assert config["configuration"] == {
        "queue": {"max_wait_s": 7.0},
        "tenants": [{"name": "acme", "weight": 3.0}],
    }
    assert simulate(trace, *flags, "--scale", "static").exit_code == 0
    assert result_in(folder).config["scale"] == ["static"]
    assert "static" in (folder / "report.html").read_text()


def test_the_files_are_complete_when_the_reader_of_the_tables_leaves(
    trace: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("llmproxy.lab.simulate.print_tables", closed)
    assert simulate(trace, "--no-oracle", "--out", str(folder)).exit_code != 0
    assert len(result_in(folder).runs) == 1
    assert (folder / "report.html").read_text().endswith("</html>\n")


@pytest.mark.slow
def test_sizes_of_a_fleet_are_compared_and_advised(trace: str, tmp_path: Path) -> None:
    flags = ("--fleet-size", "1..3", "--no-oracle", "--objective", "ttft=5s", "--out", str(tmp_path))
    done = simulate(trace, *flags)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "1 replica keeps 5 s to the first token for 100.0% of requests." in done.stdout
    result = result_in(tmp_path)
    assert [(one.policy, len(one.by_backend)) for one in result.runs] == [
        ("cost, 1 replica", 1), ("cost, 2 replicas", 2), ("cost, 3 replicas", 3),
    ]  # fmt: skip
    assert "How many replicas" in (tmp_path / "report.html").read_text()
    done = simulate(trace, *flags[:2], "--no-oracle", "--objective", "ttft=1ms")
    assert "3 replicas keep 0.001 s to the first token for 0.0% of requests: not 95.0%." in done.stdout


@pytest.mark.slow
def test_signals_are_compared_on_one_axis_of_time(trace: str, tmp_path: Path) -> None:
    done = simulate(trace, "--scale", "ours", "--scale", "static", "--no-oracle", "--out", str(tmp_path))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "cost, static, seed 1: 2.00 replicas" in done.stdout
    result = result_in(tmp_path)
    assert [one.policy for one in result.runs] == ["cost, ours", "cost, static"]
    assert [one.replicas.peak for one in result.runs if one.replicas is not None] == [1, 2]
    assert "Replicas over time" in (tmp_path / "report.html").read_text()


def test_two_runs_write_the_same_bytes(trace: str, folder: Path) -> None:
    written = []
    for name in ("a", "b"):
        done = simulate(trace, "--policy", "epp_sticky", "--rate-scale", "3", "--out", str(folder / name))
        assert done.exit_code == 0
        written.append((folder / name / "result.json").read_bytes())
    assert written[0] == written[1]
    simulate(trace, "--policy", "epp_sticky", "--rate-scale", "3", "--first-seed", "2", "--out", str(folder / "a"))
    assert (folder / "a" / "result.json").read_bytes() != written[0]


def test_without_matplotlib_the_report_has_its_tables(trace: str, folder: Path) -> None:
    done = simulate(trace, "--out", str(folder / "out"))
    assert done.exit_code == 0
    html = (folder / "out" / "report.html").read_text()
    assert "Plots need matplotlib: pip install 'llmproxy-lb[lab]'" in html
    assert "<h2>Results</h2>" in html
    assert len(result_in(folder / "out").runs) == 2


@pytest.mark.parametrize("name", ["a[b]", "a[/b]"])
def test_paths_are_printed_to_the_letter(trace: str, folder: Path, name: str) -> None:
    out = folder / name
    out.mkdir(parents=True)
    Path(trace).rename(out / "tiny.jsonl")
    done = simulate(str(out / "tiny.jsonl"), "--out", str(out))
    assert done.exit_code == 0
    assert f"wrote {out / 'result.json'}" in done.stdout


def test_without_a_place_to_write_it_only_prints(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = simulate(trace)
    assert done.exit_code == 0
    assert "goodput" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.jsonl"]


@pytest.mark.parametrize(
    ("config", "flags", "policies"),
    [
        ("", [], ["cost", "oracle"]),
        ("", ["--no-oracle"], ["cost"]),
        ("", ["--no-oracle", "--policy", "session", "--policy", "session"], ["session"]),
        ("", ["--policy", "oracle"], ["oracle"]),
        ("scheduling: {placement: least_request}", [], ["late_least_request", "oracle"]),
        ("scheduling: {placement: least_request}", ["--policy", "least_request", "--no-oracle"], ["least_request"]),
    ],
)
def test_the_policies_are_those_named_or_the_configuration_s_own(
    trace: str, folder: Path, config: str, flags: list[str], policies: list[str]
) -> None:
    (folder / "llmproxy.yaml").write_text(config)
    done = simulate(trace, *flags, "--config", str(folder / "llmproxy.yaml"), "--out", str(folder))
    assert done.exit_code == 0
    assert [one.policy for one in result_in(folder).runs] == policies


def test_every_load_is_run_once_with_bounds_of_its_own(trace: str, folder: Path) -> None:
    scales = ["--rate-scale", "2", "--rate-scale", "1", "--rate-scale", "2", "--prefill-scale", "1.9"]
    simulate(trace, *scales, "--no-oracle", "--warmup", "0.5", "--out", str(folder))
    result = result_in(folder)
    assert [one.point for one in result.runs] == [Point("cost", 1, rate, 1.9) for rate in (1.0, 2.0)]
    assert sorted(result.bounds) == [load_label(rate, 1.9) for rate in (1.0, 2.0)]
    assert all(0 < one.offered < 20 for one in result.runs)


# --- messages for mistakes --------------------------------------------------------------------------------------------


def refused(done: Result) -> str:
    """The one line that a mistake is answered with."""
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("llmproxy simulate: ")
    return done.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--policy", "blende"], "unknown policy 'blende' (nearest: 'blend')"),
        (["--policy", "blend(placement=random)"], "unknown key 'placement'"),
        (["--rate-scale", "nan"], "--rate-scale nan: should be from 0.001 to 1000"),
        (["--rate-scale", "1", "--rate-scale", "0"], "--rate-scale 0: should be from"),
        (["--prefill-scale", "inf"], "--prefill-scale inf: should be from"),
        (["--prefill-scale", "-1"], "--prefill-scale -1: should be from"),
        (["--fleet", "2xtyni"], "there is no engine profile 'tyni' (nearest: \"tiny\""),
        (["--fleet", "none.yaml"], "none.yaml: "),
        (["--trace", "none.jsonl"], "none.jsonl: cannot be read: No such file or directory"),
        (["--trace", "gen:step_burst"], "no generator 'step_burst' (nearest: \"step_bursts\")"),
        (["--trace", "gen:step_bursts,rate=fast"], "rate is 'fast'; should be a number"),
        (["--skip", "20"], "no requests left"),
        (["--scale", "hpa_que"], "--scale hpa_que: is no signal (known: ours, "),
        (["--fleet-size", "4..2"], "--fleet-size 4..2: should be 1 to 64 sizes"),
        (["--objective", "ttft=1"], "--objective ttft=1: 'ttft=1' should have a time above 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported_in_one_line(trace: str, flags: list[str], reason: str) -> None:
    assert reason in refused(simulate(trace, *flags))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({**request(4.0), "output_tokens": -1}, ":21: output_tokens"),
        (request(1.0), ":21: arrives at 1 s, before the request above it"),
        (request(4.0, criticality="urgent"), "tiny: 'urgent' is no band; known: critical"),
    ],
)
def test_bad_last_line_of_a_trace_is_refused_before_any_run(
    tmp_path: Path, line: dict[str, object], reason: str
) -> None:
    trace = write(tmp_path / "tiny.jsonl", [*(request(i / 5) for i in range(20)), line])
    assert reason in refused(simulate(trace, "--out", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_torn_last_line_is_reported_with_its_number(trace: str) -> None:
    with Path(trace).open("a") as file:
        file.write('{"at_s": 9.0, "prompt_to')
    assert re.search(r"tiny\.jsonl:21: ", refused(simulate(trace)))


def test_a_band_of_the_configuration_is_known(tmp_path: Path) -> None:
    trace = write(tmp_path / "tiny.jsonl", [request(0.0, criticality="urgent")])
    (tmp_path / "llmproxy.yaml").write_text("bands: {urgent: 50}")
    assert simulate(trace, "--config", str(tmp_path / "llmproxy.yaml")).exit_code == 0


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ("max_loras: 0", "tiny asks for adapters, and max_loras is 0 at gpu-0, gpu-1"),
        ("block_size: 48", "tiny: blocks of 512 tokens are no multiple of the engines' 48"),
    ],
)
def test_a_fleet_that_does_not_fit_the_trace_is_reported(tmp_path: Path, facts: str, reason: str) -> None:
    trace = write(tmp_path / "tiny.jsonl", [request(0.0, adapter="lora")])
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(f"replicas: [{{profile: tiny, count: 2, {facts}}}]")
    assert reason in refused(simulate(trace, fleet=str(fleet)))


def test_a_mistake_in_the_fleet_s_file_is_reported_with_its_line(trace: str, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("replicas:\n  - {profile: tiny, cuont: 2}\n")
    assert f"{fleet}:2: replicas[0].cuont" in refused(simulate(trace, fleet=str(fleet)))


@pytest.mark.parametrize("name", ["result.json", "report.html", ""])
def test_a_place_that_cannot_be_written_is_reported_before_anything_runs(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / "out"
    if name:
        (out / name).mkdir(parents=True)
    else:
        out.write_text("a file")
    monkeypatch.setattr("llmproxy.lab.simulate.run_all", lambda *_: pytest.fail("something was run"))
    assert f"--out {out}: " in refused(simulate(trace, "--out", str(out)))


def test_a_mistake_in_the_configuration_is_reported_as_serve_tells_it(trace: str, tmp_path: Path) -> None:
    (tmp_path / "llmproxy.yaml").write_text("scheduling: {placment: blend}")
    done = simulate(trace, "--config", str(tmp_path / "llmproxy.yaml"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "llmproxy.yaml:1: scheduling.placment" in done.stderr
