"""Settings that are sound and do nothing: what `llmproxy check` tells of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmproxy import cli
from llmproxy.config import hash_of, load, warnings_of

TENANT = f"tenants:\n  - name: acme\n    keys: [{hash_of('k')}]\n"
NOTHING_TO_GO_BY = "has nothing to go by: no model, tenant or objective has ttft_s or tpot_s"


def warned(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return [line.replace(str(file), "FILE") for line in warnings_of(file, load(file))]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            TENANT + "    weight: 2\n",
            "FILE:4: warning: tenants[0].weight: does not set tenants apart: a flow is a model",
        ),
        (
            TENANT + "    weight: 2\nscheduling: {flow: tenant, fairness: fcfs}\n",
            "FILE:4: warning: tenants[0].weight: has no effect: fairness fcfs looks at no weights",
        ),
        (
            "scheduling:\n  fairness: round_robin\n  weights: {m: 2}\n",
            "FILE:3: warning: scheduling.weights: has no effect: fairness round_robin looks at no weights",
        ),
        (
            "tls:\n  client_ca: ca.pem\n",
            "FILE:2: warning: tls.client_ca: has no effect without tls.cert: llmproxy serve does not start",
        ),
        ("scheduling:\n  fairness: slo\n", f"FILE:2: warning: scheduling.fairness: slo {NOTHING_TO_GO_BY}"),
        (
            "scheduling:\n  ordering: least_slack\n",
            f"FILE:2: warning: scheduling.ordering: least_slack {NOTHING_TO_GO_BY}",
        ),
        ("scheduling:\n  refuse_late: true\n", "FILE:2: warning: scheduling.refuse_late: has no effect: no model,"),
    ],
)
def test_a_setting_that_does_nothing_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    (line,) = warned(tmp_path, text)
    assert line.startswith(told)


@pytest.mark.parametrize(
    "text",
    [
        "",
        TENANT,
        "scheduling: {fairness: fcfs}\n",
        "scheduling: {weights: {m: 2}}\n",
        TENANT + "    weight: 2\nscheduling: {flow: tenant}\n",
        TENANT + "    weight: 2\nscheduling: {flow: tenant+model}\n",
        TENANT + "    weight: 2\nscheduling: {flow: 'header:x-team'}\n",
        TENANT + "    ttft_s: 1\nscheduling: {fairness: slo, refuse_late: true}\n",
        "models: [{name: m, tpot_s: 1}]\nscheduling: {fairness: slo, ordering: least_slack}\n",
        "objectives: [{name: quick, ttft_s: 1}]\nscheduling: {fairness: slo}\n",
    ],
)
def test_a_setting_that_does_something_is_not_told(tmp_path: Path, text: str) -> None:
    assert warned(tmp_path, text) == []


def test_the_example_has_no_setting_that_does_nothing() -> None:
    file = Path(__file__).parent.parent / "config.example.yaml"
    assert warnings_of(file, load(file)) == []


def test_check_tells_them_in_the_order_of_the_file_and_calls_it_fine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(TENANT + "    weight: 2\nscheduling:\n  fairness: slo\n")
    result = CliRunner().invoke(cli.app, ["check", str(file)])
    assert result.exit_code == 0
    assert [line.split(": ")[2] for line in result.stderr.splitlines()] == ["tenants[0].weight", "scheduling.fairness"]
    assert f"{file}: fine" in result.stdout
