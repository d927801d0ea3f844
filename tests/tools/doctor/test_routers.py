"""Commands and files of other routers, in the form in which people have them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.cli.first_hour import FLAGS_ELSEWHERE
from llmproxy.config import Config
from llmproxy.tools.doctor.carried import Carried, NotReadError
from llmproxy.tools.doctor.router_files import FILE_BYTES_MAX, read_from

A, B = "http://gpu-0:8000", "http://gpu-1:8000"
PODS = "kubernetes+http://pods/environment=test,release=test:8000"


def of(source: str) -> Carried:
    return read_from(source, FLAGS_ELSEWHERE)


def of_file(folder: Path, text: str | bytes) -> Carried:
    file = folder / "router.conf"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return of(str(file))


COMMANDS: dict[str, tuple[str, str, list[str], dict[str, Any], list[str]]] = {
    # name: (command, router, backends, keys, first words of each setting left out)
    "vllm-router": (
        f"vllm-router --worker-urls {A} {B} --policy cache_aware --host 0.0.0.0 --port 30000"
        " --request-timeout-secs 1800 --queue-size 500 --retry-max-retries=3"
        " --balance-abs-threshold 32 --api-key s3cret --hf-login s3cret --log-stats s3cret",
        "vllm-router",
        [A, B],
        {
            "host": "0.0.0.0",
            "port": 30000,
            "timeouts.total_s": 1800.0,
            "queue.requests_max": 500,
            "retry.extra_attempts": 3,
        },
        [
            "--policy: the default",
            "--balance-abs-threshold",
            "--api-key: a secret",
            "--hf-login",
            "--log-stats",
        ],
    ),
    "production-stack": (
        "python3 -m vllm_router.app --port 8000 \\\n --service-discovery static \\\n"
        f' --static-backends "{A},{B}" --static-models "llama,llama" \\\n --static-aliases "gpt-4:llama"'
        " --routing-logic session --session-key x-user-id --engine-stats-interval 10 --log-stats",
        "production-stack",
        [A, B],
        {"port": 8000, "scheduling.placement": "session", "scheduling.session": ["header:x-user-id"]},
        ["--static-models", "--engine-stats-interval: llmproxy reads", "--log-stats"],
    ),
    "production-stack in Kubernetes": (
        "vllm-router --service-discovery k8s --k8s-namespace llm --k8s-port 8080 --k8s-label-selector app=vllm,tier=a"
        " --routing-logic roundrobin",
        "vllm-router",
        ["kubernetes+http://llm/pods/app=vllm,tier=a:8080"],
        {},
        ["--routing-logic: the default"],
    ),
    "SGLang's gateway": (
        f"python -m sglang_router.launch_router --pd-disaggregation --prefill {A} 9000 --decode {B} --policy manual",
        "SGLang's gateway",
        [f"prefill={A}", f"decode={B}"],
        {"scheduling.placement": "session"},
        ["--pd-disaggregation"],
    ),
    "SGLang's gateway in Kubernetes": (
        "smg launch --service-discovery --selector app=sglang role=worker --service-discovery-port 30000",
        "SGLang's gateway",
        ["kubernetes+http://pods/app=sglang,role=worker:30000"],
        {},
        [],
    ),
    "gRPC": (
        f"smg --worker-urls grpc://gpu-2:20000 {A}",
        "SGLang's gateway",
        [A],
        {},
        ["a server: 'grpc://gpu-2:20000' should start with http://"],
    ),
    "endpoint picker of llm-d": (
        "/app/epp --pool-name vllm-llama --pool-namespace llm --v 4 --zap-encoder json",
        "the other router",
        ["kubernetes+http://llm/inferencepool/vllm-llama"],
        {},
        ["--v", "--zap-encoder"],
    ),
    "URLs with passwords": (
        f"vllm-router --worker-urls http://user:s3cret@gpu-0:8000 {A}?key=s3cret --routing-logic s3cret",
        "vllm-router",
        [],
        {},
        ["a server: should hold no user", f"a server: '{A}' should have no query", "--routing-logic: the default"],
    ),
    "wrong values": (
        f"vllm-router --worker-urls {A} --port http --queue-size 0 --session-key x-user",
        "vllm-router",
        [A],
        {},
        ["--port http: port: should be", "--queue-size 0: queue.requests_max: should be", "--session-key: needs"],
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str) -> None:
    command, router, backends, keys, left = COMMANDS[name]
    found = of(command)
    assert (found.router, found.backends, found.keys) == (router, backends, keys)
    # A flag without a meaning here is named without its value, which may be a secret.
    assert [text[: len(start)] for text, start in zip(found.left, left, strict=True)] == left
    assert "s3cret" not in repr(found)


def test_aliases_of_a_command() -> None:
    assert of(COMMANDS["production-stack"][0]).aliases == {"gpt-4": ["llama"]}


@pytest.mark.parametrize(
    "text",
    [
        f"#!/bin/sh\n# --worker-urls http://old:1\nexec vllm-router \\\n --worker-urls {A} {B} \\\n --policy random\n",
        f"[Service]\nExecStart=/usr/bin/vllm-router --worker-urls {A} {B} --policy random\nRestart=always\n",
        f'spec:\n  template:\n    spec:\n      containers:\n      - args: ["--worker-urls", "{A}", "{B}"]\n',
        f"services:\n  router:\n    image: router\n    command: vllm-router --worker-urls {A} {B}\n",
        f"service_discovery: static\nstatic_backends: {A},{B}\nrouting_logic: roundrobin\n",
        f'{{"worker_urls": ["{A}", "{B}"], "policy": "random"}}',
    ],
)
def test_a_command_in_a_file(tmp_path: Path, text: str) -> None:
    assert of_file(tmp_path, text).backends == [A, B]


def test_nginx(tmp_path: Path) -> None:
    found = of_file(
        tmp_path,
        "http {\n  upstream vllm {  # engines\n    least_conn;\n    server gpu-0:8000 weight=2 max_fails=3;\n"
        "    server gpu-1:8000;\n    # server gpu-2:8000;\n    server gpu-3:8000 down;\n    server unix:/run/x.sock;\n"
        "    server gpu-5:8000 backup;\n"
        "    keepalive 64; sticky secret=s3cret; }\n"
        "  upstream tls { ip_hash; server gpu-4; }\n  server {\n    listen 80;\n"
        "    location / { proxy_pass http://vllm; }\n    location /t { proxy_pass https://tls; } } }\n",
    )
    assert (found.router, found.backends) == ("nginx", [A, B, "https://gpu-4"])
    assert found.keys == {"scheduling.placement": "session"}
    assert [text.partition(":")[0] for text in found.left] == [
        "least_conn", "weight=2 of gpu-0", "server gpu-3", "server unix", "server gpu-5", "keepalive", "sticky",
        "everything outside `upstream`",
    ]  # fmt: skip


def test_litellm(tmp_path: Path) -> None:
    found = of_file(
        tmp_path,
        f"""
model_list:
  - model_name: chat
    litellm_params: {{model: hosted_vllm/meta-llama/Llama-3.1-8B, api_base: "{A}/v1", api_key: os.environ/KEY}}
  - model_name: chat
    litellm_params: {{model: openai/meta-llama/Llama-3.1-8B, api_base: "{B}/v1/", rpm: 100}}
  - model_name: mixed
    litellm_params: {{model: hosted_vllm/a, api_base: {A}}}
  - model_name: mixed
    litellm_params: {{model: hosted_vllm/b, api_base: {B}}}
  - {{model_name: same, litellm_params: {{model: hosted_vllm/same, api_base: {A}}}}}
  - {{model_name: gpt-4o, litellm_params: {{model: gpt-4o, api_key: sk-s3cret}}}}
  - {{model_name: var, litellm_params: {{model: hosted_vllm/x, api_base: os.environ/VLLM_URL}}}}
router_settings:
  {{routing_strategy: least-busy, num_retries: 4, timeout: 600, redis_host: r,
   model_group_alias: {{fast: chat, hidden: {{model: mixed, hidden: true}}}}}}
litellm_settings: {{drop_params: true, num_retries: 9}}
general_settings: {{master_key: sk-s3cret}}
""",
    )
    assert (found.router, found.backends) == ("LiteLLM", [A, B])
    assert found.keys == {"retry.extra_attempts": 4, "timeouts.total_s": 600.0}
    assert found.aliases == {
        "chat": ["meta-llama/Llama-3.1-8B"],
        "mixed": ["a", "b"],
        "fast": ["meta-llama/Llama-3.1-8B"],
        "hidden": ["a", "b"],
    }
    assert "s3cret" not in repr(found)
    assert (found.servers_key, found.clients_key) == (True, True)
    for part in (
        "master_key: a secret",
        "litellm_settings.drop_params",
        "api_key of chat",
        "rpm of chat",
        "gpt-4o",
        "variable VLLM_URL",
        "redis_host",
    ):
        assert any(part in text for text in found.left), part


def test_general_settings_of_litellm_and_its_command(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model_list: [{{model_name: m, litellm_params: {{model: hosted_vllm/m, api_base: {A}}}}}]\n"
        "litellm_settings: {num_retries: 2, request_timeout: 900}\n"
    )
    for source in (str(file), f"litellm --config {file} --port 4000", f"/usr/bin/litellm --port 4000 -c={file}"):
        found = of(source)
        assert (found.backends, found.left) == ([A], [])
        assert found.keys == {"retry.extra_attempts": 2, "timeouts.total_s": 900.0}
    with pytest.raises(NotReadError, match="commands of LiteLLM are not read: give its configuration file"):
        of(f"litellm --model hosted_vllm/sim --api_base {A}")


@pytest.mark.parametrize(
    ("text", "backends", "keys"),
    [
        ("servingEngineSpec:\n  modelSpec:\n  - {name: m, modelURL: m/m, replicaCount: 2}\n", [PODS], {}),
        (
            "servingEngineSpec: {containerPort: 8080, labels: {app: vllm}, vllmApiKey: s3cret}\n"
            "routerSpec: {routingLogic: session, sessionKey: x-user-id, rootPath: /v, repository: r,"
            " extraArgs: [--log-stats, --queue-size, '7']}\n",
            ["kubernetes+http://pods/app=vllm:8080"],
            {
                "queue.requests_max": 7,
                "scheduling.placement": "session",
                "scheduling.session": ["header:x-user-id"],
            },
        ),
        (f"routerSpec: {{serviceDiscovery: static, staticBackends: '{A},{B}', staticModels: 'm,m'}}\n", [A, B], {}),
    ],
)
def test_values_of_production_stack(tmp_path: Path, text: str, backends: list[str], keys: dict[str, Any]) -> None:
    found = of_file(tmp_path, text)
    assert (found.router, found.backends, found.keys) == ("production-stack", backends, keys)
    assert "s3cret" not in repr(found)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_inference_pool(tmp_path: Path, wrapped: bool) -> None:
    pool = (
        "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\n"
        "metadata: {name: vllm-llama, namespace: llm}\n"
        "spec:\n  selector: {matchLabels: {app: vllm}}\n  targetPorts: [{number: 8000}]\n"
        "  endpointPickerRef: {name: epp, port: {number: 9002}}\n"
    )
    if wrapped:
        pool = "kind: List\nitems:\n- " + pool.replace("\n", "\n  ").rstrip() + "\n"
    text = f"kind: ConfigMap\nmetadata: {{name: x}}\n---\n{pool}"
    assert of_file(tmp_path, text).backends == ["kubernetes+http://llm/inferencepool/vllm-llama"]


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has none of: `model_list`"),
        ("\n\n# nothing\n", "has none of"),
        ("hello", "has none of"),
        ("apiVersion: v1\nkind: Service\nmetadata: {name: x}\n", "has none of"),
        ("a: [b\n", "has none of: .* As YAML it is wrong: line 2"),
        ("a: !!python/object:os.system x\n", "has none of: .* As YAML it is wrong: line 1"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is no text"),
        (b"\x00\x01\x02", "It is no YAML"),
        ("[" * 100_000, "has none of"),
        (LAUGHS, "has none of"),
        (" " * (FILE_BYTES_MAX + 1), "has more than 4 MB"),
        ("model_list: 7\n", "has `model_list`, but not in the shape of its router"),
        ("model_list: [{model_name: x}]\n", "has `model_list`, but not in the shape"),
        ("model_list: [{model_name: x, litellm_params: {model: 7}}]\n", "has `model_list`, but not in the shape"),
        ("routerSpec: [a]\n", "has `routerSpec`, but not in the shape"),
        ("routerSpec: {serviceDiscovery: static}\n", "has `routerSpec`, but not in the shape"),
        ("kind: InferencePool\n", "has `InferencePool`, but not in the shape"),
        ('vllm-router --worker-urls "http://a', "cannot be split into words"),
    ],
)
def test_wrong_files_are_refused_in_words(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(NotReadError, match=message) as raised:
        of_file(tmp_path, text)
    assert str(tmp_path / "router.conf") in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("name", ["", "/none/router.yaml", "x" * 300, "a\x00b", "vllm-router"])
def test_no_file_is_an_error(name: str) -> None:
    with pytest.raises(NotReadError, match=r"cannot be read: .*; --from takes a file, or a command in quotes"):
        of(name)


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotReadError, match="cannot be read: Is a directory"):
        of(str(tmp_path))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    file.touch()
    os.truncate(file, 100 << 20)
    with pytest.raises(NotReadError, match="more than 4 MB"):
        of(str(file))


WORDS = st.sampled_from([
    "--worker-urls", "--policy", "--prefill", "--selector", "--static-aliases", "--port", "model_list:", "routerSpec:",
    "kind: InferencePool", "upstream x {", "server a;", "}", "\n", "- ", "  ", "[", "{", "'", '"', "http://a", "a=b",
    "&a", "*a", "litellm_params:", "\x00", "#", ":", ",",
])  # fmt: skip


@given(st.lists(WORDS | st.text(max_size=8), max_size=30).map(" ".join), st.booleans())
def test_random_texts_end_in_a_result_or_an_error(tmp_path_factory: Any, text: str, as_file: bool) -> None:
    with suppress(NotReadError):
        if as_file:
            found = of_file(tmp_path_factory.getbasetemp(), text.encode("utf-8", "surrogateescape"))
        else:
            found = of("router --x " + text)
        Config.model_validate({"backends": found.backends})
