"""The rules under promtool: each alert fires in its case, and not in similar cases."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmproxy.observe.metrics import Metrics
from llmproxy.tools.export import files_of
from llmproxy.tools.export.files import RULES
from llmproxy.tools.export.rules import ALERTS, RUNBOOK, rules
from tests import ROOT
from tests.docs.pages import blocks
from tests.docs.reference import full_exit, live_state

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")

Series = dict[str, str]
"""Series -> its values, one a minute, in promtool's notation."""


@dataclass(frozen=True)
class Case:
    """An alert with series that fire it and series that do not."""

    alert: str
    # Time of evaluation, in promtool's notation.
    at: str
    fires: Series
    # Labels of the alert that `fires` causes.
    labels: dict[str, str]
    silent: Series


def proxy(metric: str, **labels: str) -> str:
    given = {"job": "llmproxy", "instance": "p:8080", **labels}
    return f"llmproxy_{metric}{{{','.join(f'{name}={value!r}' for name, value in given.items())}}}".replace("'", '"')


def ended(outcome: str, code: str = "2xx", band: str = "default") -> str:
    return proxy("requests_total", outcome=outcome, code=code, band=band, model="m")


def objectives(missed: int, band: str = "critical") -> Series:
    counts = {"missed": missed, "met": 100 - missed}
    return {proxy("objectives_total", band=band, result=result): f"0+{n}x90" for result, n in counts.items()}


def waits(band: str, within: str) -> Series:
    """Series of waits of a band that all fall into the bucket `within`."""
    ends = ("1.0", "2.5", "5.0", "+Inf")
    return {
        proxy(
            "queue_wait_seconds_bucket", band=band, le=end
        ): f"0+{60 if ends.index(end) >= ends.index(within) else 0}x20"
        for end in ends
    }


def pool(*saturations: float, waiting: int = 3) -> Series:
    series = {proxy("queued_requests", band="default"): f"{waiting}x30"}
    for number, saturation in enumerate(saturations):
        name = f"gpu-{number}"
        series[proxy("backend_saturation", backend=name)] = f"{saturation}x30"
        series[proxy("backend_available", backend=name)] = "1x30"
        series[proxy("backend_info", backend=name, pool="m")] = "1x30"
    return series


def backend(down: int, drained: int = 0, ejected: int = 0) -> Series:
    states = {"backend_down": down, "backend_drained": drained, "backend_ejected": ejected}
    return {proxy(name, backend="gpu-0"): f"{value}x30" for name, value in states.items()}


def predictions(covered: int, count: int = 60) -> Series:
    labels = {"backend": "gpu-0", "time": "ttft"}
    return {
        proxy("predictions_covered_total", **labels): f"0+{covered}x60",
        proxy("prediction_error_ratio_count", **labels): f"0+{count}x60",
    }


JOB = {"job": "llmproxy"}
HERE = {**JOB, "instance": "p:8080"}
ON = {**HERE, "backend": "gpu-0"}
BURNT = {**JOB, "band": "default"}
FINE = {ended("completed"): "0+1000x5000"}
CLIENTS = {ended("upstream_status", "4xx"): "0+500x5000", ended("rate_limited", "4xx"): "0+500x5000"}
"""Errors of clients, however many."""
CASES = (
    Case("LlmproxyErrorBudgetBurn", "90m", FINE | {ended("expired", "4xx"): "0+20x5000"},
         {**BURNT, "severity": "page", "window": "1h"}, FINE | CLIENTS),
    Case("LlmproxyErrorBudgetBurn", "10h", FINE | {ended("upstream_status", "5xx"): "0+8x5000"},
         {**BURNT, "severity": "page", "window": "6h"}, FINE | CLIENTS),
    Case("LlmproxyErrorBudgetBurn", "80h", FINE | {ended("broken_stream"): "0+2x5000"},
         {**BURNT, "severity": "ticket", "window": "3d"}, FINE | {ended("broken_stream"): "0+0.5x5000"}),
    Case("LlmproxyErrorBudgetBurn", "90m", FINE | {ended("rejected_capacity", "5xx", "none"): "0+20x5000"},
         {**JOB, "band": "none", "severity": "page", "window": "1h"},
         FINE | {ended("rejected_capacity", "5xx", "none"): "0+0.5x5000"}),
    Case("LlmproxyErrorBudgetBurn", "70m", {ended("completed"): "0+1x90", ended("expired", "4xx"): "0+1x90"},
         {**BURNT, "severity": "page", "window": "1h"},
         {ended("completed"): "0+1x90", ended("expired", "4xx"): "0x67 3x30"}),
    Case("LlmproxyObjectiveBurn", "70m", objectives(20), {**JOB, "band": "critical"},
         {proxy("objectives_total", band="critical", result="missed"): "0x67 3x30"}),
    Case("LlmproxyObjectiveBurn", "70m", objectives(20), {**JOB, "band": "critical"},
         objectives(5) | objectives(50, "default")),
    Case("LlmproxyNoBackend", "5m", {proxy("build_info", version="1"): "1x10"}, HERE,
         {proxy("build_info", version="1"): "1x10", proxy("backend_available", backend="gpu-0"): "0x10",
          proxy("backend_available", backend="gpu-1"): "1x10"}),
    Case("LlmproxyNoBackend", "5m", {proxy("backend_available", backend="gpu-0"): "0x10"}, HERE,
         {proxy("backend_available", backend="gpu-0"): "1x10"}),
    Case("LlmproxyCriticalWaits", "15m", waits("critical", "5.0"), {**JOB, "band": "critical"},
         waits("critical", "1.0") | waits("default", "5.0")),
    Case("LlmproxyPoolSaturated", "15m", pool(1.0, 1.2), {**HERE, "pool": "m"}, pool(1.0, 0.5)),
    Case("LlmproxyPoolSaturated", "15m", pool(1.0), {**HERE, "pool": "m"}, pool(1.0, 1.0, waiting=0)),
    Case("LlmproxyStarvation", "25m", {proxy("queued_requests", band="sheddable"): "2x30"},
         {**JOB, "band": "sheddable"},
         {proxy("queued_requests", band="default"): "2x30", ended("completed"): "0+1x30"}),
    Case("LlmproxyStarvation", "25m",
         {proxy("queued_requests", band="default"): "2x30", ended("expired", "4xx"): "0+5x30"},
         {**JOB, "band": "default"}, {proxy("queued_requests", band="default"): "0x30"}),
    # The leader of a cluster has the queue, and another member the clients.
    Case("LlmproxyStarvation", "25m",
         {proxy("queued_requests", band="default"): "2x30", ended("completed", band="critical"): "0+1x30"}, BURNT,
         {proxy("queued_requests", band="default", instance="leader"): "2x30",
          proxy("queued_requests", band="default"): "0x30", ended("completed"): "0+1x30"}),
    Case("LlmproxyInversion", "10m", {proxy("priority_inversions_total"): "0 0 0 1x20"}, HERE,
         {proxy("priority_inversions_total"): "1x20"}),
    Case("LlmproxyBackendDown", "10m", backend(1), ON, backend(1, drained=1)),
    Case("LlmproxyBackendDown", "10m", backend(1, ejected=1), ON, backend(0, ejected=1)),
    Case("LlmproxyBackendEjected", "16m", backend(0, ejected=1), ON, backend(1, ejected=1)),
    Case("LlmproxyBackendEjected", "16m", backend(0, ejected=1), ON,
         {proxy("backend_ejected", backend="gpu-0"): "0x12 1x5"}),
    Case("LlmproxyKvPressure", "20m", {proxy("backend_kv_used_ratio", backend="gpu-0"): "0.99x30"}, ON,
         {proxy("backend_kv_used_ratio", backend="gpu-0"): "0.9x30"}),
    Case("LlmproxyEngineQueues", "15m", {proxy("backend_waiting", backend="gpu-0"): "3x30"}, ON,
         {proxy("backend_waiting", backend="gpu-0"): "1x30"}),
    Case("LlmproxyReadingStale", "5m",
         {proxy("backend_reading_age_seconds", backend="gpu-0"): "20+60x10"} | backend(1), ON,
         {proxy("backend_reading_age_seconds", backend="gpu-0"): "1x10"} | backend(0)),
    Case("LlmproxyReadingStale", "5m",
         {proxy("backend_reading_age_seconds", backend="gpu-0"): "20+60x10"} | backend(1), ON,
         {proxy("backend_reading_age_seconds", backend="gpu-0"): "20+60x10"} | backend(1, drained=1)),
    Case("LlmproxyConfigReloadFailed", "10m", {proxy("config_last_reload_successful"): "0x20"}, HERE,
         {proxy("config_last_reload_successful"): "1x20"}),
    Case("LlmproxyWorkerLost", "10m", {proxy("workers_lost_total"): "0 0 1x20"}, HERE,
         {proxy("workers_lost_total"): "1x20"}),
    Case("LlmproxyNoLeader", "5m", {proxy("cluster_has_leader"): "0x10"}, HERE, {proxy("cluster_has_leader"): "1x10"}),
    Case("LlmproxyTwoLeaders", "5m",
         {proxy("cluster_leader", instance="a"): "1x10", proxy("cluster_leader", instance="b"): "1x10"}, JOB,
         {proxy("cluster_leader", instance="a"): "1x10", proxy("cluster_leader", instance="b"): "0x10"}),
    Case("LlmproxyClusterLockUnreachable", "5m", {proxy("cluster_lock_unreachable"): "1x10"}, HERE,
         {proxy("cluster_lock_unreachable"): "0x10"}),
    Case("LlmproxyLogLost", "10m", {proxy("log_lines_lost_total"): "0 0 7x20"}, HERE,
         {proxy("log_lines_lost_total"): "0x20", proxy("decision_log_lines_lost_total"): "0x20"}),
    Case("LlmproxyLogLost", "10m", {proxy("decision_log_lines_lost_total"): "0 0 7x20"}, HERE,
         {proxy("decision_log_lines_lost_total"): "5x20"}),
    Case("LlmproxyPredictionsOff", "55m", predictions(30), {**HERE, "time": "ttft"}, predictions(54)),
    Case("LlmproxyPredictionsOff", "55m", predictions(30), {**HERE, "time": "ttft"}, predictions(1, count=2)),
    Case("LlmproxyAbsent", "10m", {"other": "1x20"}, {}, {proxy("build_info", version="1"): "1x20"}),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / RULES).write_text(files_of("alerts")[RULES])
    page = blocks(ROOT / "docs/how-to/monitoring.md")
    text = next(block.text for block in page if block.title == "prometheus.yml")
    (tmp_path / "prometheus.yml").write_text(text)
    return tmp_path


def promtool(folder: Path, *arguments: str, stdin: bytes | None = None) -> tuple[int, str]:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, input=stdin, capture_output=True, check=False)
    return done.returncode, (done.stdout + done.stderr).decode()


def firing(folder: Path, case: Case, series: Series) -> set[frozenset[tuple[str, str]]]:
    """Labels of the firing alerts of this name. promtool prints them, because the test expects none."""
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": []}],
    }
    # A rule over days takes a minute of CPU if it is evaluated for each minute of the days.
    every = "1m" if case.at.endswith("m") else "20m"
    content = {
        "rule_files": [RULES],
        "evaluation_interval": every,
        # Without an order, an alert may read values that were recorded one evaluation earlier.
        "group_eval_order": [group["name"] for group in rules()["groups"]],
        "tests": [test],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(content, sort_keys=False))
    code, said = promtool(folder, "test", "rules", "test.yml")
    assert (code == 0) == ("SUCCESS" in said), said
    got = said.partition("got:")[2]
    assert code == 0 or got, said
    return {frozenset(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in re.findall(r"Labels:{([^}]*)}", got)}


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.alert}" for i, case in enumerate(CASES)])
def test_an_alert_fires_where_it_is_to_and_not_beside_it(case: Case, folder: Path) -> None:
    fired = firing(folder, case, case.fires)
    wanted = {("alertname", case.alert), *case.labels.items()}
    assert any(wanted <= labels for labels in fired), f"{wanted} is not among {fired}"
    assert not firing(folder, case, case.silent)


def test_every_alert_has_a_case() -> None:
    assert {(case.alert, case.labels.get("window", "")) for case in CASES} == {(one.name, one.window) for one in ALERTS}


@needs_promtool
def test_promtool_finds_nothing_wrong(folder: Path) -> None:
    for check in (("rules", RULES), ("config", "prometheus.yml")):
        code, said = promtool(folder, "check", *check)
        assert code == 0, said
        assert "lint" not in said


@needs_promtool
def test_the_metrics_page_is_as_prometheus_wants_it(tmp_path: Path) -> None:
    metrics = Metrics(live_state)
    metrics.record(full_exit())
    code, said = promtool(tmp_path, "check", "metrics", stdin=metrics.page())
    assert (code, said) == (0, "")


@pytest.mark.parametrize("name", sorted({alert.name for alert in ALERTS}))
def test_an_alert_leads_to_a_paragraph(name: str) -> None:
    urls = {alert.rule()["annotations"]["runbook_url"] for alert in ALERTS if alert.name == name}
    assert urls == {f"{RUNBOOK}{name.lower()}"}
    page = ROOT / RUNBOOK.partition("/main/")[2].rstrip("#")
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no paragraph of {name}"
    assert len(found[1]) > 150


def test_every_paragraph_is_of_an_alert() -> None:
    page = ROOT / RUNBOOK.partition("/main/")[2].rstrip("#")
    assert re.findall(r"^## (\w+)$", page.read_text(), re.MULTILINE) == list(dict.fromkeys(one.name for one in ALERTS))


def test_the_page_says_of_every_alert_how_it_fires_in_the_demo() -> None:
    page = ROOT / RUNBOOK.partition("/main/")[2].rstrip("#")
    rows = re.findall(r"^\| (Llmproxy\w+) \| \S.* \|$", page.read_text(), re.MULTILINE)
    assert rows == list(dict.fromkeys(one.name for one in ALERTS))
