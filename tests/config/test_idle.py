"""Warnings of `llmproxy check` for settings without an effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmproxy.cli import commands as cli
from llmproxy.config import hash_of, load, warnings_of
from tests import ROOT

TENANT = f"tenants:\n  - name: acme\n    keys: [{hash_of('k')}]\n"
NO_OBJECTIVE = "has no objective to measure: no model, tenant or objective has ttft_s or tpot_s"


def warned(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    found = [line.split(": warning: ") for line in warnings_of(file, load(file))]
    return [f"{line.removeprefix(str(file))}: {text}" for line, text in found]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TENANT + "    weight: 2\nscheduling: {flow: tenant, fairness: fcfs}",
            "4: tenants[0].weight: fairness fcfs looks at no weights",
        ),
        (
            "scheduling:\n  fairness: round_robin\n  weights: {m: 2}",
            "3: scheduling.weights: fairness round_robin looks at no weights",
        ),
        ("scheduling:\n  refuse_late: true", "2: scheduling.refuse_late: no model,"),
        (
            "backends: [http://a]\nscheduling:\n  disaggregation: always",
            "3: scheduling.disaggregation: no backend has a role",
        ),
        (
            "backends:\n- url: http://a\n  role: prefill",
            "3: backends[0].role: no backend answers, so these answer too",
        ),
        ("backends:\n- url: http://a\n  role: decode", "3: backends[0].role: no backend computes prompts for others"),
        ("scheduling:\n  session: body:user", "2: scheduling.session: placement is cost, which looks at no sessions"),
        (
            "scheduling:\n  fairness: fcfs\n  fairness_cost: requests",
            "3: scheduling.fairness_cost: fairness is fcfs, which shares out nothing",
        ),
        ("scheduling: {slo_window_s: 1}", "1: scheduling.slo_window_s: fairness is fair_share, not slo"),
        (
            "scheduling: {fairness_cost: requests, input_weight: 3}",
            "1: scheduling.input_weight: no tokens are charged: fairness is fair_share,",
        ),
        (
            "scheduling: {fairness: fcfs, output_weight: 3}",
            "1: scheduling.output_weight: no tokens are charged: fairness is fcfs,",
        ),
        ("decision_log_sample: 0.5", "1: decision_log_sample: there is no decision_log"),
        (
            "scheduling: {placement: round_robin}\nbackends:\n- url: http://a\n  prompt_tokens: [1, 2]",
            "4: backends[0].prompt_tokens: placement is round_robin, not cost",
        ),
        ("admin: {host: '::1'}", "1: admin.host: there is no admin.port"),
        (
            "admin: {port: 9090, public_metrics: true}",
            "1: admin.public_metrics: everybody who reaches admin.port sees /metrics there",
        ),
        ("trust_proxy_headers: true", "1: trust_proxy_headers: there are no clients.trusted_proxies"),
        ("retry: {extra_attempts: 0, budget_ratio: 0.5}", "1: retry.budget_ratio: retry.extra_attempts is 0"),
        ("retry: {extra_attempts: 0, continue: always}", "1: retry.continue: retry.extra_attempts is 0"),
        (
            "backends: [http://a]\ndiscovery: {misses_before_removal: 9}",
            "2: discovery.misses_before_removal: the url of no backend begins with dns+ or srv+",
        ),
        (
            "backends: [kubernetes+http://service/a]\ndiscovery: {misses_before_removal: 9}",
            "2: discovery.misses_before_removal: the url of no backend begins with dns+ or srv+",
        ),
        (
            "backends: [dns+http://a]\ndiscovery: {kubernetes_api: http://127.0.0.1:8001}",
            "2: discovery.kubernetes_api: the url of no backend begins with kubernetes+",
        ),
    ],
)
def test_setting_without_effect_is_a_warning_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (line,) = warned(tmp_path, text)
    place, why = line.split(": has no effect: ")
    assert f"{place}: {why}".startswith(f":{message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TENANT + "    weight: 2\n", ":4: tenants[0].weight: does not set tenants apart: a flow is a model"),
        (
            "tls:\n  client_ca: ca.pem\n",
            ":2: tls.client_ca: has no effect without tls.cert: llmproxy serve does not start",
        ),
        ("scheduling:\n  fairness: slo\n", f":2: scheduling.fairness: slo {NO_OBJECTIVE}"),
        (
            "scheduling: {placement: round_robin}\nmodels:\n- {name: m, ttft_s: 1,\n  tpot_s: 0.05}\n",
            ":4: models[0].tpot_s: is only counted as kept or missed: placement round_robin, ordering least_slack",
        ),
        (
            "scheduling: {placement: round_robin, ordering: fcfs}\nobjectives: [{name: quick, ttft_s: 1}]\n",
            ":2: objectives[0].ttft_s: is only counted as kept or missed: placement round_robin, ordering fcfs",
        ),
        (
            TENANT + "    ttft_s: 1\nscheduling: {placement: session, ordering: fcfs}\n",
            ":4: tenants[0].ttft_s: is only counted as kept or missed: placement session, ordering fcfs",
        ),
        (
            "models:\n- name: m\n  tpot_s: 50\n",
            ":3: models[0].tpot_s: is 50 seconds, which nearly nothing misses: 50 milliseconds are 0.05",
        ),
        (TENANT + "    ttft_s: 1500\n", ":4: tenants[0].ttft_s: is 1500 seconds, which nearly nothing misses"),
    ],
)
def test_setting_without_the_effect_that_it_seems_to_have_is_a_warning(tmp_path: Path, text: str, message: str) -> None:
    (line,) = warned(tmp_path, text)
    assert line.startswith(message)


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
        "models: [{name: m, ttft_s: 600, tpot_s: 10}]\nscheduling: {ordering: fcfs}\n",
        "models: [{name: m, ttft_s: 1, tpot_s: 1}]\nscheduling: {placement: session, fairness: slo, ordering: fcfs}\n",
        "models: [{name: m, ttft_s: 1}]\nscheduling: {placement: session, ordering: fcfs}\nplugins: [json]\n",
        "models: [{name: m, ttft_s: 1}]\nscheduling: {placement: round_robin}\n",
        "models: [{name: m, ttft_s: 1}]\nscheduling: {placement: round_robin, ordering: fcfs, refuse_late: true}\n",
        "scheduling: {placement: session, session: 'body:user'}\n",
        "scheduling: {session: 'body:user'}\nmodels: [{name: m, targets: {m: 9, n: 1}}]\n",
        "scheduling: {fairness: fcfs, fairness_cost: requests, min_shares: {sheddable: 0.1}}\n",
        "scheduling: {fairness: fcfs, min_shares: {sheddable: 0.1}, input_weight: 2, output_weight: 3}\n",
        "scheduling: {session: 'body:user', slo_window_s: 1}\nplugins: [json]\n",
        "decision_log: d.jsonl\ndecision_log_sample: 0.5\nadmin: {host: '::1', port: 9090}\n",
        "discovery: {dns_interval_s: 9}\n",
        "backends: [{url: http://a, prompt_tokens: [1, 2]}]\n",
        "backends: ['dns+http://a']\ndiscovery: {dns_interval_s: 9, misses_before_removal: 9}\n",
    ],
)
def test_setting_with_effect_is_no_warning(tmp_path: Path, text: str) -> None:
    assert warned(tmp_path, text) == []


def test_example_has_no_setting_without_effect() -> None:
    file = ROOT / "config.example.yaml"
    assert warnings_of(file, load(file)) == []


def test_check_prints_warnings_in_file_order_and_succeeds(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(TENANT + "    weight: 2\nscheduling:\n  fairness: slo\n")
    result = CliRunner().invoke(cli.app, ["check", str(file)])
    assert result.exit_code == 0
    assert [line.split(": ")[2] for line in result.stderr.splitlines()] == ["tenants[0].weight", "scheduling.fairness"]
    assert f"{file}: fine" in result.stdout
