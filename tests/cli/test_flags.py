"""Variables and flags that set no key: ignored if Kubernetes set them, else refused with advice."""

from __future__ import annotations

import pytest

from llmproxy.cli.flags import FLAGS, flag_of, from_environment, unknown_flags
from llmproxy.config import ConfigError, Override, keys_of_files, load
from llmproxy.lifecycle.handover import DRAINED
from llmproxy.lifecycle.sockets import PREDECESSOR


def refused(**variables: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_environment(variables)
    return list(caught.value.problems)


@pytest.mark.parametrize("service", ["LLMPROXY", "LLMPROXY_ADMIN", "LLMPROXY_CANARY"])
def test_variables_of_a_kubernetes_service_are_ignored(service: str) -> None:
    set_by_it = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "8080", "SERVICE_PORT_HTTP": "8080"}
    for protocol in ("tcp", "udp", "sctp"):
        port = f"PORT_8080_{protocol.upper()}"
        set_by_it |= {"PORT": f"{protocol}://10.0.0.1:8080", port: f"{protocol}://10.0.0.1:8080"}
        set_by_it |= {f"{port}_PROTO": protocol, f"{port}_PORT": "8080", f"{port}_ADDR": "10.0.0.1"}
        assert from_environment({f"{service}_{name}": text for name, text in set_by_it.items()}) == []


def test_address_of_kubernetes_is_ignored_only_in_a_port_variable() -> None:
    assert from_environment({"LLMPROXY_PORT": "81"}) == [Override("port", "81", "LLMPROXY_PORT")]
    message = {"LLMPROXY_BACKEND": "tcp://a"}
    assert from_environment(message) == [Override("backends", ["tcp://a"], "LLMPROXY_BACKEND")]
    assert refused(LLMPROXY_CANARY_PORT="8080") == [
        'LLMPROXY_CANARY_PORT: is not a known variable (nearest known variable: "LLMPROXY_ADMIN_PORT")'
    ]


def test_empty_variables_and_variables_for_a_successor_are_ignored() -> None:
    given = {"LLMPROXY_PORT": "", PREDECESSOR: "{}", DRAINED: "[]", "LLMPROXY_CONFIG": "c.yaml", "OTHER": "1"}
    assert from_environment(given) == []


@pytest.mark.parametrize("variable", ["LLMPROXY_API_KEY", "LLMPROXY_API_KEYS"])
def test_empty_secret_is_refused(variable: str) -> None:
    overrides = from_environment({variable: ""})
    with pytest.raises(ConfigError, match=rf"{variable}: api_keys\[0\]: should be printable"):
        load(None, overrides)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("LLMPROXY_BAKCENDS", 'is not a known variable (nearest known variable: "LLMPROXY_BACKENDS")'),
        ("LLMPROXY_HUNG_S", 'is not a known variable (nearest known variable: "LLMPROXY_HEALTH_HUNG_S")'),
        ("LLMPROXY_CONFIGFILE", 'is not a known variable (nearest known variable: "LLMPROXY_CONFIG")'),
        ("LLMPROXY_", 'is not a known variable (nearest known variable: "LLMPROXY_'),
        ("LLMPROXY_TENANTS", "only a file can hold tenants: write it into the file that --config names"),
        ("LLMPROXY_SCHEDULING_WEIGHTS", "only a file can hold scheduling.weights: write it into the file"),
        ("LLMPROXY_BACKENDS_MAX_IN_FLIGHT", "only a file can hold backends[].max_in_flight: write it into the file"),
    ],
)
@pytest.mark.parametrize("text", ["1", ""])
def test_unknown_variable_is_refused_with_advice(variable: str, message: str, text: str) -> None:
    (problem,) = refused(**{variable: text})
    assert problem.startswith(f"{variable}: {message}")


def test_unknown_variables_are_reported_at_once() -> None:
    message = refused(LLMPROXY_PROT="1", LLMPROXY_BANDS="1", LLMPROXY_HOST="::")
    assert [problem.partition(":")[0] for problem in message] == ["LLMPROXY_BANDS", "LLMPROXY_PROT"]


def test_flag_of_a_key_of_files_is_refused_with_the_key() -> None:
    names = [flag_of(key.replace("[]", "")) for key in keys_of_files()]
    assert {"--tenants", "--bands", "--models-target", "--backends-tls-ca", "--queue-band-max-wait-s"} <= set(names)
    message = unknown_flags(names, [flag.name for flag in FLAGS])
    assert [problem.partition(": only a file can hold ")[0] for problem in message] == list(dict.fromkeys(names))
    assert unknown_flags(["--criticality=1", "7", "--criticality", "2", "--", "--weight"], ()) == [
        "--criticality: only a file can hold models[].criticality or objectives[].criticality or"
        " tenants[].criticality: write it into the file that --config names"
    ]


def test_flag_of_a_key_without_its_section_is_refused_with_the_whole_one() -> None:
    assert unknown_flags(["--flow=tenant", "--max-wait-s", "3"], [flag.name for flag in FLAGS]) == [
        "--flow: is not a known flag; write --scheduling-flow (--help-all shows all flags)",
        "--max-wait-s: is not a known flag; write --queue-max-wait-s (--help-all shows all flags)",
    ]
    assert unknown_flags(["--low", "--s", "--queue"], ()) == [], "parts of words are none"
