"""What docs/how-to/kubernetes.md shows is what Kubernetes, kustomize and the program take."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llmproxy.config import load
from tests import ROOT
from tests.deploy import PAGE
from tests.deploy.objects import KUBERNETES, LEASE, RIGHTS, built, complaints, kind, only, parsed
from tests.docs.pages import blocks

BLOCKS = {block.title: block.text for block in blocks(PAGE) if block.title}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("title", ["role.yaml", "vllm.yaml"])
def test_manifests_are_those_of_kubernetes(title: str, version: str) -> None:
    assert [text for one in parsed(BLOCKS[title]) for text in complaints(one, version)] == []


def test_the_role_has_every_right_that_the_chart_gives() -> None:
    [role] = parsed(BLOCKS["role.yaml"])
    given = [*(rule for rules in RIGHTS.values() for rule in rules), *LEASE]
    assert all(rule in role["rules"] for rule in given)
    assert all(rule in given for rule in role["rules"])


def test_pods_of_vllm_have_time_for_their_streams() -> None:
    [pod] = [one["spec"]["template"]["spec"] for one in kind(parsed(BLOCKS["vllm.yaml"]), "Deployment")]
    [container] = pod["containers"]
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    drains_s = int(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] > waits_s + drains_s


@pytest.mark.parametrize("title", ["llmproxy.yaml", "backends.yaml"])
def test_the_program_takes_configurations(title: str, tmp_path: Path) -> None:
    (tmp_path / title).write_text(BLOCKS[title])
    assert load(tmp_path / title).backends


def test_kustomize_builds_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "llmproxy").symlink_to(ROOT)
    own = tmp_path / "own"
    own.mkdir()
    for name in ("kustomization.yaml", "llmproxy.yaml"):
        (own / name).write_text(BLOCKS[name])
    objects = built(own)
    holder, deployment = only(objects, "ConfigMap"), only(objects, "Deployment")
    assert yaml.safe_load(holder["data"]["llmproxy.yaml"])["tenants"][0]["name"] == "research"
    assert deployment["metadata"]["namespace"] == "serving"
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith("registry.example.com/llmproxy:")
