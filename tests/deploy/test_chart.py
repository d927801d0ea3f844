"""Objects of the chart for given values."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmproxy.config import load
from llmproxy.config.changes import NEEDS_RESTART
from llmproxy.config.config import Config
from llmproxy.config.keys import walk
from llmproxy.config.pods_url import INFERENCE_POOL, NAMES, PODS, SERVICE, PodsUrl
from tests import ROOT
from tests.deploy import CHART, PAGE
from tests.deploy.objects import (
    EXTENSION,
    KUBERNETES,
    LEASE,
    MISSING,
    NAMESPACE,
    POD_RIGHTS,
    POOLS,
    RIGHTS,
    SLICES,
    Object,
    complaints,
    kind,
    noted,
    only,
    parsed,
    pods,
    rendered,
    unrestricted,
)
from tests.docs.keys_page import default
from tests.docs.pages import blocks
from tests.e2e.proxies import FAST, serving

VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
IN_PAGE = [block.text for block in blocks(PAGE) if block.title and block.title.endswith("values.yaml")]
EVERY = [path.read_text() for path in VALUES] + IN_PAGE
IDS = [path.stem.removesuffix("-values") for path in VALUES] + [f"page-{n}" for n in range(len(IN_PAGE))]
MINIMAL = (CHART / "ci" / "minimal-values.yaml").read_text()
HELPERS = (CHART / "templates" / "_helpers.tpl").read_text()
every = pytest.mark.parametrize("values", EVERY, ids=IDS)


def of(config: Any = None, **values: Any) -> list[Object]:
    return rendered(yaml.safe_dump({**values, "config": config or {}}))


# --- every file of values ---------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_are_valid_in_kubernetes(values: str, version: str) -> None:
    objects = rendered(values)
    assert len(objects) >= 5
    assert [text for one in objects for text in complaints(one, version)] == []


@every
def test_chart_lints(values: str) -> None:
    helm = pytest.importorskip("helm_python", reason=MISSING.format("helm-python-sdk"))
    found = helm.lint(CHART, helm.values_from_yaml(values))
    assert found["errors"] == []
    assert [one for one in found["messages"] if one["error"] != "icon is recommended"] == []


@every
def test_pods_are_restricted(values: str) -> None:
    objects = rendered(values)
    assert len(pods(objects)) == 2, "the proxy and the test of Helm"
    for pod in pods(objects):
        assert unrestricted(pod) == []
        for container in pod["containers"]:
            assert "cpu" not in container["resources"]["limits"], "a proxy that is throttled delays streams"
            assert "memory" in container["resources"]["limits"]
            assert not any("subPath" in mount for mount in container.get("volumeMounts", ()))


@every
def test_names_that_objects_have_for_each_other_exist(values: str) -> None:
    objects = rendered(values)
    deployment = only(objects, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for service in kind(objects, "Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for one in kind(objects, "PodDisruptionBudget", "PodMonitor"):
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
    accounts = {one["metadata"]["name"] for one in kind(objects, "ServiceAccount")}
    assert pod["serviceAccountName"] in accounts
    for binding in kind(objects, "RoleBinding"):
        assert binding["roleRef"]["name"] in {one["metadata"]["name"] for one in kind(objects, "Role")}
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": NAMESPACE}
        ]
    # Pods that are no proxies must be in no Service of them.
    for one in kind(objects, "Pod"):
        assert not deployment["spec"]["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()


@every
def test_the_program_takes_its_configuration(values: str, tmp_path: Path) -> None:
    objects = rendered(values)
    given = yaml.safe_load(values)
    if given.get("existingSecret"):
        assert kind(objects, "ConfigMap", "Secret") == []
        return
    [holder] = kind(objects, "ConfigMap", "Secret")
    assert holder["kind"] == given.get("configKind", "ConfigMap")
    text = holder["data" if holder["kind"] == "ConfigMap" else "stringData"]["llmproxy.yaml"]
    (tmp_path / "llmproxy.yaml").write_text(text)
    config = load(tmp_path / "llmproxy.yaml")
    assert len(config.backends) == len(given["config"].get("backends", []))
    deployment = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert deployment["terminationGracePeriodSeconds"] >= config.drain_delay_s + config.drain_timeout_s + 10


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", NAMES)
@pytest.mark.parametrize(("namespace", "role"), [("", ""), ("models/", ""), ("", "prefill="), ("models/", " both = ")])
def test_rights_follow_the_urls_of_backends(word: str, namespace: str, role: str) -> None:
    known = NAMES[word]
    name = {SERVICE: "vllm:http", PODS: "app=vllm,llm-d.ai/role=decode", INFERENCE_POOL: "qwen"}[known]
    url = f"kubernetes+http://{namespace}{word.upper()}/{name}"
    assert PodsUrl.of(url).kind == known
    objects = of({"backends": [role + url]})
    role_object, binding = only(objects, "Role"), only(objects, "RoleBinding")
    assert role_object["rules"] == RIGHTS[known]
    for one in (role_object, binding):
        assert one["metadata"]["namespace"] == (namespace.rstrip("/") or NAMESPACE)
    assert pods(objects)[1]["automountServiceAccountToken"] is True


def test_several_sources_have_the_rights_of_each() -> None:
    urls = ["kubernetes+http://svc/a", {"url": "Kubernetes+https://serving/infpool/b", "tls": {"server_name": "b"}}]
    objects = of({"backends": [*urls, "kubernetes+http://far/po/app=c", "http://d:8000", "dns+http://e:8000"]})
    roles = {one["metadata"]["namespace"]: one for one in kind(objects, "Role")}
    assert roles[NAMESPACE]["rules"] == [SLICES, POD_RIGHTS, POOLS, EXTENSION]
    assert roles["far"]["rules"] == [POD_RIGHTS]
    assert roles["far"]["metadata"]["name"] == "llmproxy.serving", "there may be proxies in several namespaces"
    assert len(kind(objects, "RoleBinding")) == 2
    assert not kind(objects, "ClusterRole", "ClusterRoleBinding")
    assert not kind(of({"backends": urls}, rbac={"create": False}), "Role", "RoleBinding")


@pytest.mark.parametrize("lock", ["kubernetes", None, "valkey://valkey:6379"])
def test_members_have_the_right_to_their_lease_alone(lock: str | None) -> None:
    cluster = {"listen": "0.0.0.0:8090", "plaintext": True} | ({} if lock is None else {"lock": lock})
    objects = of({"backends": ["http://d:8000"], "cluster": cluster})
    roles = kind(objects, "Role")
    if lock == "valkey://valkey:6379":
        assert roles == []
    else:
        assert [role["rules"] for role in roles] == [LEASE]
        assert pods(objects)[1]["automountServiceAccountToken"] is True
    [container] = pods(objects)[1]["containers"]
    assert {"name": "cluster", "containerPort": 8090} in container["ports"]
    named = of({"backends": [], "cluster": cluster | {"name": "chat"}}) if lock is None else []
    assert [rule.get("resourceNames") for role in kind(named, "Role") for rule in role["rules"]] == (
        [["chat"], None] if lock is None else []
    )


def test_only_members_reach_the_port_of_members() -> None:
    cluster = {"listen": "0.0.0.0:8090", "plaintext": True}
    for listen in (True, False):
        given = {"backends": ["http://d:8000"]} | ({"cluster": cluster} if listen else {})
        policy = only(of(given, networkPolicy={"enabled": True}), "NetworkPolicy")["spec"]
        rules = [rule for rule in policy["ingress"] if rule["ports"] == [{"protocol": "TCP", "port": "cluster"}]]
        out = [rule for rule in policy["egress"] if rule["ports"] == [{"protocol": "TCP", "port": 8090}]]
        assert len(rules) == len(out) == listen
        peers = [{"podSelector": policy["podSelector"]}]
        assert all(rule["from"] == peers for rule in rules)
        assert all(rule["to"] == peers for rule in out)


def test_without_the_cluster_there_are_neither_rights_nor_a_token() -> None:
    objects = of({"backends": ["http://d:8000", "prefill=dns+http://e:8000"]})
    assert kind(objects, "Role", "RoleBinding") == []
    assert [pod["automountServiceAccountToken"] for pod in pods(objects)] == [False, False]
    assert only(objects, "ServiceAccount")["automountServiceAccountToken"] is False


# --- what follows from values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [0, 1, 2, 5])
def test_only_several_proxies_have_a_budget(replicas: int) -> None:
    objects = of(replicaCount=replicas)
    budgets = kind(objects, "PodDisruptionBudget")
    assert [one["spec"]["maxUnavailable"] for one in budgets] == [1] * (replicas >= 2)
    assert only(objects, "Deployment")["spec"]["replicas"] == replicas


@pytest.mark.parametrize(("delay_s", "timeout_s"), [(0, 0), (2.5, 600.25), (None, None)])
def test_pods_have_the_time_of_the_drain_and_more(delay_s: float | None, timeout_s: float | None) -> None:
    pod = pods(of({"drain_delay_s": delay_s, "drain_timeout_s": timeout_s}))[1]
    # Helm takes null for "not given", and then the program's own defaults hold.
    drain_s = (delay_s or 0) + (Config().drain_timeout_s if timeout_s is None else timeout_s)
    assert drain_s + 10 < pod["terminationGracePeriodSeconds"] < drain_s + 20


def test_a_change_replaces_no_proxy_before_another_is_there() -> None:
    strategy = only(of(), "Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize(
    ("admin", "port"),
    [({}, "admin"), ({"host": "127.0.0.1"}, "http"), (None, "http")],
    ids=["port-of-its-own", "port-for-this-pod-alone", "port-of-clients"],
)
def test_clients_at_connections_max_do_not_end_a_proxy(admin: Object | None, port: str) -> None:
    [container] = pods(of({"admin": admin}))[1]["containers"]
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: (get["path"], get["port"]) for name, get in asked.items()} == {
        "startup": ("/health", port),
        "liveness": ("/health", port),
        "readiness": ("/ready", "http"),
    }


def test_the_proxy_is_asked_by_tls_where_it_speaks_it() -> None:
    config = {"tls": {"cert": "/etc/llmproxy-secrets/a/tls.crt"}, "admin_key": "sha256:" + "0" * 64}
    scaling = {"kind": "keda", "adminKeySecret": {"name": "a"}, "targets": [{"pool": "m", "deployment": "d", "max": 2}]}
    objects = of(config, secrets=["a"], podMonitor={"enabled": True}, autoscaling=scaling)
    [container] = pods(objects)[1]["containers"]
    schemes = {container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "liveness", "readiness")}
    assert schemes == {"HTTPS"}
    assert only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    [trigger] = only(objects, "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["url"] == "https://llmproxy-admin.serving.svc:9090/scale/m"
    assert "/etc/llmproxy-secrets/a" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_operators_use_the_port_of_clients_without_an_admin_port() -> None:
    objects = of({"admin": None, "port": 8001}, podMonitor={"enabled": True}, networkPolicy={"enabled": True})
    headless = next(one for one in kind(objects, "Service") if one["spec"].get("clusterIP") == "None")
    assert headless["spec"]["ports"] == [{"name": "admin", "port": 8001, "targetPort": "http"}]
    assert only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == "http"
    assert len(only(objects, "NetworkPolicy")["spec"]["ingress"]) == 1


def test_a_state_file_has_a_folder_that_can_be_written() -> None:
    assert {one["name"] for one in pods(of())[1]["volumes"]} == {"config"}
    for claim, volume in (("", {"emptyDir": {}}), ("c", {"persistentVolumeClaim": {"claimName": "c"}})):
        pod = pods(of({"state_file": "/var/lib/llmproxy/state.json"}, stateClaim=claim))[1]
        assert {"name": "state", **volume} in pod["volumes"]
        assert {"name": "state", "mountPath": "/var/lib/llmproxy"} in pod["containers"][0]["volumeMounts"]


def test_only_named_ports_are_open_to_operators() -> None:
    objects = rendered((CHART / "ci" / "closed-values.yaml").read_text())
    clients, operators = only(objects, "NetworkPolicy")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in (clients, operators)] == ["http", "admin"]
    assert operators["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    egress = only(objects, "NetworkPolicy")["spec"]["egress"]
    assert {port["port"] for rule in egress for port in rule["ports"]} == {53, 443, 6443, 8000, 4318}
    without = only(of({"backends": ["http://a:8000"]}, networkPolicy={"enabled": True}), "NetworkPolicy")
    assert {port["port"] for rule in without["spec"]["egress"] for port in rule["ports"]} == {53, 8000}


# --- autoscaling ------------------------------------------------------------------------------------------------------


def test_autoscalers_equal_those_of_kustomize_and_of_the_documentation() -> None:
    authentication, written = parsed((ROOT / "deploy/kustomize/overlays/autoscale/keda.yaml").read_text())
    objects = rendered((CHART / "ci" / "keda-values.yaml").read_text())
    ours = only(objects, "ScaledObject")["spec"]
    url = ours["triggers"][0]["metadata"]["url"]
    assert url == "http://llmproxy-admin.serving.svc:9090/scale/Qwen/Qwen3-8B"
    written["spec"]["triggers"][0]["metadata"]["url"] = url
    assert ours == written["spec"]
    assert only(objects, "TriggerAuthentication")["spec"] == authentication["spec"]
    page = blocks(ROOT / "docs/how-to/autoscaling.md")
    [hpa] = parsed(next(block.text for block in page if block.title == "hpa.yaml"))
    assert (
        only(rendered((CHART / "ci" / "hpa-values.yaml").read_text()), "HorizontalPodAutoscaler")["spec"] == hpa["spec"]
    )


def test_work_of_two_proxies_adds_up_and_need_does_not() -> None:
    first, second = kind(rendered((CHART / "ci" / "two-proxies-values.yaml").read_text()), "ScaledObject")
    asked = [
        [(one["metadata"]["valueLocation"], one["metadata"]["aggregationType"]) for one in scaled["spec"]["triggers"]]
        for scaled in (first, second)
    ]
    # Where nothing is known, the need is what there is: a sum of it would grow without end.
    assert asked == [[("need", "max"), ("own", "sum")], [("roles.prefill.need", "max")]]


def test_members_of_a_cluster_all_say_the_need_of_the_whole() -> None:
    cluster = yaml.safe_load((CHART / "ci" / "cluster-values.yaml").read_text())
    scaling = yaml.safe_load((CHART / "ci" / "keda-values.yaml").read_text())
    values = cluster | scaling | {"replicaCount": 3, "config": scaling["config"] | cluster["config"]}
    [trigger] = only(rendered(yaml.safe_dump(values)), "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["valueLocation"] == "need"
    assert trigger["metadata"]["aggregationType"] == "max"


@pytest.mark.parametrize(
    ("name", "words"),
    [("two-proxies", ["hold within each of them"]), ("cluster", ["decide as one"]), ("minimal", [])],
)
def test_notes_say_whether_proxies_decide_as_one(name: str, words: list[str]) -> None:
    notes = noted((CHART / "ci" / f"{name}-values.yaml").read_text())
    assert [known for known in ("hold within each of them", "decide as one") if known in notes] == words


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"autoscaling": {"kind": "keda"}}, "adminKeySecret.name"),
        ({"autoscaling": {"kind": "hpa", "targets": [{"pool": "a/b", "deployment": "d", "max": 1}]}}, "cannot hold"),
        (
            {"autoscaling": {"kind": "hpa", "targets": [
                {"pool": "a", "deployment": "d", "max": 1, "value": "roles.decode.need"}]}},
            "value is for keda",
        ),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
        ({"config": {"state_file": "state.json"}}, "config.state_file"),
        ({"config": {"state_file": "/state.json"}}, "config.state_file"),
        ({"config": {"tls": {"client_ca": "/ca.pem"}}}, "config.tls.client_ca"),
        ({"config": {"backends": ["kubernetes+http://deployment/vllm"]}}, "config.backends"),
        ({"config": {"backends": ["kubernetes+http://vllm"]}}, "config.backends"),
    ],
)  # fmt: skip
def test_unworkable_values_are_refused_with_a_reason(values: Any, words: str) -> None:
    helm = pytest.importorskip("helm_python", reason=MISSING.format("helm-python-sdk"))
    with pytest.raises(helm.HelmError, match=re.escape(words)):
        rendered(yaml.safe_dump(values))


# --- the chart and the program ----------------------------------------------------------------------------------------


def test_a_packaged_chart_renders_like_the_folder(tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python", reason=MISSING.format("helm-python-sdk"))
    values = helm.values_from_yaml(MINIMAL)
    with helm.Chart.load(helm.package(CHART, destination=tmp_path)) as packaged, helm.Chart.load(CHART) as folder:
        assert packaged.render(values, name="a") == folder.render(values, name="a")


def test_defaults_in_templates_equal_the_programs() -> None:
    known = {key.name: default(key).strip("`") for key in walk(Config)}
    texts = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    found = re.findall(r'dig ((?:"[a-z_]+" )+)([^ ]+) \.Values\.config', texts)
    assert len(found) >= 8
    for path, given in found:
        key = ".".join(re.findall("[a-z_]+", path))
        assert key in known
        if re.fullmatch(r"\d+", given):
            assert given == known[key], key


def test_pods_are_replaced_for_settings_that_need_a_restart() -> None:
    top, scheduling = (
        set(re.search(rf'define "llmproxy.{name}" -}}}}\n(.*)\n', HELPERS)[1].split())  # type: ignore[index]
        for name in ("restartKeys", "restartSchedulingKeys")
    )
    assert top == {key for key in NEEDS_RESTART if "." not in key}
    assert scheduling == {
        key.partition(".")[2] for key in NEEDS_RESTART if "." in key and not key.startswith("clients.")
    }


def test_pods_stay_for_settings_that_a_reload_applies() -> None:
    def checksum(config: Any) -> str:
        return str(only(of(config), "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/restart"])

    before = checksum({})
    for same in (
        {"queue": {"max_wait_s": 1}},
        {"clients": {"allowed_origins": ["*"]}},
        {"scheduling": {"flow": "tenant"}},
    ):
        assert checksum(same) == before, same
    for other in ({"workers": 2}, {"clients": {"idle_timeout_s": 1}}, {"scheduling": {"ordering": "fcfs"}}):
        assert checksum(other) != before, other


async def test_the_test_of_helm_asks_a_running_proxy() -> None:
    [container] = next(pod for pod in pods(rendered(MINIMAL)) if pod.get("restartPolicy"))["containers"]
    assert container["command"] == ["python", "-c"]
    [script] = container["args"]

    async def run(url: str) -> tuple[int | None, str]:
        there = script.replace("http://llmproxy.serving.svc:8080", url.rstrip("/"))
        assert there != script
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", there, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, _ = await child.communicate()
        return child.returncode, out.decode()

    async with serving(FAST) as proxy:
        code, said = await run(proxy.app.url)
        assert (code, said.count("200")) == (0, 2)
    async with serving(FAST, api_keys=["k" * 8]) as proxy:
        assert (await run(proxy.app.url))[0] == 0
    async with serving(wait=False, extra=["http://127.0.0.1:9"]) as proxy:
        assert (await run(proxy.app.url))[0] == 1
