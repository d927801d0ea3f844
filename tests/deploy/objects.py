"""Objects of Kubernetes as mappings: rendered by Helm or kustomize, and judged by the schemas of Kubernetes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from llmproxy.config.pods_url import INFERENCE_POOL, PODS, SERVICE
from tests.deploy import CHART
from tests.deploy.custom_resources import SCHEMAS

Object = dict[str, Any]
NAMESPACE = "serving"
KUBERNETES = ("1.29", "1.33", "1.37")
"""The oldest version that the chart is for, one between, and the newest whose schemas there are."""
MISSING = "{} is not installed; `make deploy-test` brings it"
TOLERANCE_SINCE = (1, 33)


def rendered(values: str, namespace: str = NAMESPACE) -> list[Object]:
    """Returns the objects of `helm template llmproxy` with a file of values. Raises HelmError of the library."""
    found = _files(values, namespace)
    return list(parsed(*(text for file, text in sorted(found.items()) if file.endswith(".yaml"))))


def noted(values: str) -> str:
    """Returns the notes that Helm prints after an installation."""
    [notes] = [text for file, text in _files(values, NAMESPACE).items() if file.endswith("NOTES.txt")]
    return notes


def _files(values: str, namespace: str) -> dict[str, str]:
    helm = pytest.importorskip("helm_python", reason=MISSING.format("helm-python-sdk"))
    with helm.Chart.load(CHART) as chart:
        found: dict[str, str] = chart.render(helm.values_from_yaml(values), name="llmproxy", namespace=namespace)
    return found


def built(folder: Path) -> list[Object]:
    """Returns the objects of `kubectl kustomize` for a folder."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning"
    return list(parsed(done.stdout))


def parsed(*texts: str) -> Iterator[Object]:
    for text in texts:
        yield from filter(None, yaml.safe_load_all(text))


def kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def only(objects: Iterable[Object], wanted: str) -> Object:
    [found] = kind(objects, wanted)
    return found


def pods(objects: Iterable[Object]) -> list[Object]:
    """The specifications of all pods."""
    return [one["spec"] for one in kind(objects, "Pod")] + [
        one["spec"]["template"]["spec"] for one in kind(objects, "Deployment")
    ]


SLICES = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
POD_RIGHTS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
POOLS = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": ["list", "watch"]}
EXTENSION = {
    "apiGroups": ["llm-d.ai", "inference.networking.x-k8s.io"],
    "resources": ["inferenceobjectives", "inferencemodelrewrites"],
    "verbs": ["list", "watch"],
}
LEASE = [
    {
        "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["llmproxy"],
        "verbs": ["get", "update"],
    },
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
]  # fmt: skip
RIGHTS = {SERVICE: [SLICES], PODS: [POD_RIGHTS], INFERENCE_POOL: [POD_RIGHTS, POOLS, EXTENSION]}
"""All that the proxy reads of a cluster, as docs/how-to/kubernetes.md says."""


# --- schemas ----------------------------------------------------------------------------------------------------------


def complaints(one: Object, version: str) -> list[str]:
    """Returns the errors of an object in a version of Kubernetes, unknown fields included."""
    if one["kind"] == "HorizontalPodAutoscaler" and tuple(map(int, version.split("."))) < TOLERANCE_SINCE:
        # The chart leaves it out where Helm says that the cluster is older, which cannot be said here.
        one = json.loads(json.dumps(one))
        del one["spec"]["behavior"]["scaleUp"]["tolerance"]
    group, _, _ = one["apiVersion"].partition("/")
    validator = _custom(one["kind"]) if group in SCHEMAS else _builtin(one["apiVersion"], one["kind"], version)
    return [f"{one['kind']}.{error.json_path}: {error.message}" for error in validator.iter_errors(one)]


@cache
def _custom(wanted: str) -> Draft202012Validator:
    [schema] = [kinds[wanted] for kinds in SCHEMAS.values() if wanted in kinds]
    return Draft202012Validator(schema)


@cache
def _builtin(api_version: str, wanted: str, version: str) -> Draft202012Validator:
    group, _, number = api_version.rpartition("/")
    name = "-".join(filter(None, (wanted.lower(), group.partition(".")[0], number)))
    schema = json.loads((_folder(version) / f"{name}.json").read_text())
    return Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    one = Resource.from_contents(json.loads((_folder(version) / "_definitions.json").read_text()))
    return one @ Registry()


def _folder(version: str) -> Any:
    pytest.importorskip("kubernetes_validate", reason=MISSING.format("kubernetes-validate"))
    folders = files("kubernetes_validate") / "kubernetes-json-schema"
    [folder] = [one for one in folders.iterdir() if one.name.startswith(f"v{version}.") and "strict" in one.name]
    return folder


# --- Pod Security -----------------------------------------------------------------------------------------------------


VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def unrestricted(pod: Object) -> list[str]:
    """Returns the violations of Pod Security's profile "restricted" and of a read-only root file system."""
    shared = pod.get("securityContext", {})
    found = [f"{key} of the host" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    found += [f"volume {one['name']}" for one in pod.get("volumes", ()) if not (one.keys() - {"name"}) <= VOLUMES]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container.get("securityContext", {})
        both = shared | own
        wanted = {
            "runs as root": both.get("runAsNonRoot") is True and both.get("runAsUser", 1) != 0,
            "no seccomp profile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "may gain privileges": own.get("allowPrivilegeEscalation") is False and not own.get("privileged"),
            "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "writes to its root": own.get("readOnlyRootFilesystem") is True,
            "has a port of the host": not any("hostPort" in port for port in container.get("ports", ())),
        }
        found += [f"{container['name']}: {words}" for words, good in wanted.items() if not good]
    return found
