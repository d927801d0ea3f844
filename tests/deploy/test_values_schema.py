"""Wrong values are errors before anything is installed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests import ROOT
from tests.deploy import CHART
from tests.deploy.objects import MISSING
from tests.deploy.values_schema import SCHEMA

VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
HASH = "sha256:" + "0" * 64


def problems(values: Any) -> list[str]:
    validator = Draft7Validator(json.loads(SCHEMA.read_text()))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(values)]


def test_the_schema_is_a_json_schema() -> None:
    Draft7Validator.check_schema(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize("path", [CHART / "values.yaml", *VALUES], ids=lambda path: path.stem)
def test_defaults_and_examples_are_good(path: Any) -> None:
    assert problems(json.loads(json.dumps(yaml.safe_load(path.read_text()), default=str))) == []


def test_every_key_of_the_program_is_known() -> None:
    example = yaml.safe_load((ROOT / "config.example.yaml").read_text())
    assert problems({"config": example}) == []
    texts = {"backends": ["prefill=http://a:1"], "tenants": [{"name": "t", "keys": [HASH]}], "models": None}
    assert problems({"config": texts | {"queue": None}}) == []


@pytest.mark.parametrize(
    ("config", "place", "words"),
    [
        ({"portt": 1}, "", "portt"),
        ({"queue": {"ttl": 60}}, "/queue", "ttl"),
        ({"backends": [{"url": "http://a:1", "max_inflight": 3}]}, "/backends/0", "max_inflight"),
        ({"tenants": [{"name": "t", "keys": [{"hash": HASH, "expiry": 1}]}]}, "/tenants/0/keys/0", "expiry"),
        ({"models": [{"target": "a"}]}, "/models/0", "name"),
        ({"port": 70_000}, "/port", "65"),
        ({"queue": {"max_wait_s": 0}}, "/queue/max_wait_s", "0"),
        ({"queue": {"requests_max": 0.5}}, "/queue/requests_max", "integer"),
        ({"workers": "many"}, "/workers", "integer"),
    ],
    ids=json.dumps,
)
def test_a_wrong_key_is_named(config: Any, place: str, words: str) -> None:
    assert problems({"config": config})
    helm = pytest.importorskip("helm_python", reason=MISSING.format("helm-python-sdk"))
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError) as error:
        chart.render({"config": config})
    for message in (str(error.value), *helm.lint(CHART, {"config": config})["errors"]):
        assert re.search(f"'/config{place}'.*{words}", message, re.DOTALL), message
    assert helm.lint(CHART, {"config": config})["errors"]


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 2},
        {"autoscaling": {"kind": "vpa"}},
        {"autoscaling": {"targets": [{"pool": "m", "deployment": "vllm"}]}},
        {"autoscaling": {"targets": [{"pool": "m", "deployment": "vllm", "max": 2, "value": "desired"}]}},
        {"configKind": "Configmap"},
        {"ingress": {"enabled": True, "hosts": []}},
        {"httpRoute": {"enabled": True, "parentRefs": []}},
        {"image": {"tag": 1.0}},
    ],
    ids=json.dumps,
)
def test_wrong_values_of_the_chart_are_refused(values: Any) -> None:
    assert problems(values)
