"""Kubernetes, kustomize and the program accept the examples of docs/how-to/kubernetes.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from llmproxy.config import ClusterTlsConfig, load
from tests import ROOT
from tests.deploy import CHART, PAGE
from tests.deploy.objects import KUBERNETES, LEASE, RIGHTS, built, complaints, kind, only, parsed
from tests.docs.pages import blocks

BLOCKS = {block.title: block.text for block in blocks(PAGE) if block.title}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("title", ["role.yaml", "vllm.yaml"])
def test_manifests_are_valid_in_kubernetes(title: str, version: str) -> None:
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


@pytest.mark.parametrize("title", ["llmproxy.yaml", "backends.yaml", "all.yaml"])
def test_the_program_takes_configurations(title: str, tmp_path: Path) -> None:
    (tmp_path / title).write_text(BLOCKS[title])
    assert load(tmp_path / title).backends


def test_values_name_the_keys_of_a_secret() -> None:
    """The chart does not see the Secret, and gives rights and ports by its own defaults and these values."""
    secret, values = yaml.safe_load(BLOCKS["all.yaml"]), yaml.safe_load(BLOCKS["all-values.yaml"])
    config = yaml.safe_load((CHART / "values.yaml").read_text())["config"] | values["config"]
    for key in ("admin", "backends", "drain_delay_s", "drain_timeout_s", "state_file"):
        assert secret[key] == config[key], key
    assert values["config"]["cluster"].items() <= secret["cluster"].items()
    assert {one["pool"] for one in values["autoscaling"]["targets"]} == set(secret["scaling"]["pools"])


def test_kubectl_makes_the_secrets_that_the_page_names(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    for name in ("llmproxy.yaml", "all.yaml"):
        (tmp_path / name).write_text(BLOCKS[name])
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_text("PEM")
    commands = [
        command.partition("|")[0].replace("--dry-run=client --output yaml", "")
        for block in blocks(PAGE)
        for command in re.findall(r"kubectl [^\n]*create secret generic(?:[^\n]*\\\n)*[^\n]*", block.text)
        if block.language == "shell" and "$key" not in command
    ]
    made = [
        yaml.safe_load(
            subprocess.run(
                ["sh", "-ec", f"{command} --dry-run=client --output yaml"], cwd=tmp_path, check=True, text=True,
                stdout=subprocess.PIPE,
            ).stdout
        )
        for command in commands
    ]  # fmt: skip
    assert [(one["metadata"]["name"], one.get("type"), [*one["data"]]) for one in made] == [
        ("llmproxy-config", None, ["llmproxy.yaml"]),
        ("llmproxy-members", "kubernetes.io/tls", ["ca.crt", "tls.crt", "tls.key"]),
        ("llmproxy-config", None, ["llmproxy.yaml"]),
    ]


def test_cert_manager_makes_the_certificates_of_members() -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in parsed(BLOCKS["members.yaml"])}
    values = yaml.safe_load(BLOCKS["cluster-values.yaml"])
    certificate, authority = objects["Certificate", "llmproxy-members"], objects["Certificate", "llmproxy-authority"]
    assert certificate["secretName"] in values["secrets"]
    assert certificate["dnsNames"] == [ClusterTlsConfig().name]
    assert {"server auth", "client auth"} <= set(certificate["usages"]), "each is client and server"
    issuer = objects[certificate["issuerRef"]["kind"], certificate["issuerRef"]["name"]]
    assert issuer["ca"]["secretName"] == authority["secretName"]
    assert objects[authority["issuerRef"]["kind"], authority["issuerRef"]["name"]] == {"selfSigned": {}}


def test_kustomize_builds_the_shown_folder(tmp_path: Path) -> None:
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
