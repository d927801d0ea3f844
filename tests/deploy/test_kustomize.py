"""kustomize builds the same objects as the chart with the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmproxy import __version__
from llmproxy.config import load
from tests.deploy import CHART, KUSTOMIZE
from tests.deploy.objects import KUBERNETES, Object, built, complaints, kind, only, pods, rendered, unrestricted

BASE, HA, AUTOSCALE = KUSTOMIZE / "base", KUSTOMIZE / "overlays" / "ha", KUSTOMIZE / "overlays" / "autoscale"
HELM_LABELS = {"helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"}
every = pytest.mark.parametrize("folder", [BASE, HA, AUTOSCALE], ids=lambda folder: folder.name)


def plain(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Kind and name -> the object without what Helm or kustomize alone writes."""
    found = {}
    for one in objects:
        metadata: Any = one["metadata"]
        if "helm.sh/hook" in metadata.get("annotations", {}):
            continue
        metadata["labels"] = {key: value for key, value in metadata["labels"].items() if key not in HELM_LABELS}
        metadata.pop("namespace", None)
        if one["kind"] == "Deployment":
            one["spec"]["template"]["metadata"].pop("annotations", None)
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(text) for name, text in one["data"].items()}
        found[one["kind"], metadata["name"]] = one
    return found


@pytest.mark.sampled(4)
@every
@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_are_valid_in_kubernetes(folder: Path, version: str) -> None:
    assert [text for one in built(folder) for text in complaints(one, version)] == []


@every
def test_pods_are_restricted(folder: Path) -> None:
    [pod] = pods(built(folder))
    assert unrestricted(pod) == []
    [container] = pod["containers"]
    assert container["image"] == f"llmproxy:{__version__}"
    assert not any("subPath" in mount for mount in container["volumeMounts"])


@every
def test_the_program_takes_its_configuration(folder: Path, tmp_path: Path) -> None:
    objects = built(folder)
    (tmp_path / "llmproxy.yaml").write_text(only(objects, "ConfigMap")["data"]["llmproxy.yaml"])
    config = load(tmp_path / "llmproxy.yaml")
    drain_s = config.drain_delay_s + config.drain_timeout_s
    assert pods(objects)[0]["terminationGracePeriodSeconds"] >= drain_s + 10


@pytest.mark.parametrize(
    ("folder", "values", "more"),
    [(BASE, "minimal", ""), (HA, "minimal", "replicaCount: 2"), (AUTOSCALE, "keda", "")],
    ids=["base", "ha", "autoscale"],
)
def test_objects_equal_the_charts(folder: Path, values: str, more: str) -> None:
    text = (CHART / "ci" / f"{values}-values.yaml").read_text()
    assert plain(built(folder)) == plain(rendered(f"{text}{more}", "default"))


def test_a_namespace_reaches_the_account_that_has_the_rights(tmp_path: Path) -> None:
    # Kustomize takes relative paths alone.
    base = Path(*[".."] * len(tmp_path.resolve().parts[1:]), *BASE.parts[1:])
    (tmp_path / "kustomization.yaml").write_text(f"namespace: serving\nresources: [{base}]\n")
    objects = built(tmp_path)
    assert {one["metadata"]["namespace"] for one in objects} == {"serving"}
    assert only(objects, "RoleBinding")["subjects"][0]["namespace"] == "serving"
    assert not kind(objects, "ClusterRole", "ClusterRoleBinding")
