"""The command `llmproxy export`."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from llmproxy.cli.commands import app
from llmproxy.tools.export import KINDS, files_of


@pytest.mark.parametrize("kind", KINDS)
def test_export_writes_its_files_and_names_the_next_step(kind: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", kind, str(tmp_path / "new" / "folder")])
    assert done.exit_code == 0, done.output
    written = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    assert written == files_of(kind)
    assert {Path(line).name for line in done.stdout.splitlines() if line} == set(written)
    assert done.stderr.startswith("\nNext: ")
    for name, text in written.items():
        assert json.loads(text) if name.endswith(".json") else all(yaml.safe_load_all(text))


def test_an_unknown_kind_names_the_known(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "graphana", str(tmp_path)])
    assert (done.exit_code, done.stderr.strip()) == (
        2,
        "llmproxy export: graphana is none of grafana, alerts, prometheus, scaling",
    )
    assert not list(tmp_path.iterdir())


def test_unusable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["export", "alerts", str(tmp_path / "file" / "below")])
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
    assert "Not a directory" in done.stderr


def test_the_rules_are_where_the_configuration_looks_for_them() -> None:
    (config,) = (yaml.safe_load(text) for text in files_of("prometheus").values())
    assert config["rule_files"] == list(files_of("alerts"))


def test_an_autoscaler_that_follows_the_manifests_comes_to_the_desired_number() -> None:
    """The rule of an HPA for an external metric with an average value, as Kubernetes documents it."""
    documents = [one for text in files_of("scaling").values() for one in yaml.safe_load_all(text)]
    behaviours = [
        one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] if one["kind"] == "ScaledObject"
        else one["spec"]["behavior"]
        for one in documents if one["kind"] != "TriggerAuthentication"
    ]  # fmt: skip
    assert len(behaviours) == 3
    for behaviour in behaviours:
        tolerance = float(behaviour["scaleUp"]["tolerance"])
        for there in (1, 9, 10, 20):
            need = there + 0.4
            ratio = need / there
            wanted = there if abs(ratio - 1.0) <= tolerance else ceil(need)
            assert wanted == there + 1
    (trigger,) = next(one for one in documents if one["kind"] == "ScaledObject")["spec"]["triggers"]
    assert (trigger["metadata"]["valueLocation"], trigger["metadata"]["targetValue"]) == ("need", "1")
