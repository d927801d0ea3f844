"""From objects to backends: which pods get requests, under which name, at which port."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from llmproxy.backends.kubernetes.endpoints import (
    ACTIVE_PORTS,
    Builder,
    UnclearPortError,
    pod_backends,
    pool_backends,
    service_backends,
)
from llmproxy.backends.kubernetes.objects import EndpointSlice, InferencePool, Pod
from llmproxy.backends.registry import Instance
from llmproxy.config import BackendConfig
from llmproxy.config.pods_url import PodsUrl
from tests.backends.kubernetes.api_server import Object, endpoint, endpoint_slice, inference_pool, pod


def builder(url: str = "kubernetes+http://service/vllm", suffix: str = "", **given: Any) -> Builder:
    template = BackendConfig(url=url, **given)
    found = PodsUrl.of(url)
    return Builder(template, found.scheme, found.port, suffix)


def slices(where: Builder, *objects: Object) -> list[Instance]:
    return service_backends(where, [msgspec.convert(one, EndpointSlice) for one in objects])


def pods(where: Builder, *objects: Object) -> list[Instance]:
    return pod_backends(where, [msgspec.convert(one, Pod) for one in objects])


def pool(where: Builder, one: Object, *objects: Object) -> list[Instance]:
    return pool_backends(where, msgspec.convert(one, InferencePool), [msgspec.convert(each, Pod) for each in objects])


def shown(backends: list[Instance]) -> dict[str, tuple[str, bool]]:
    return {one.name: (one.url.removeprefix("http://"), one.ready) for one in backends}


# --- slices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, True),
        ({"ready": None, "serving": None, "terminating": None}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, None),
        ({"ready": False, "serving": False, "terminating": True}, None),
        # publishNotReadyAddresses: always ready, though it terminates.
        ({"ready": True, "terminating": True}, None),
    ],
)
def test_conditions_say_whether_a_server_is_there(conditions: dict[str, Any], expected: bool | None) -> None:
    found = slices(builder(), endpoint_slice("s", endpoint("a", **conditions)))
    assert [one.ready for one in found] == ([] if expected is None else [expected])


def test_a_pod_is_named_by_its_name_and_known_by_its_uid() -> None:
    found = slices(builder(max_in_flight=7, api_key="k", role="decode"), endpoint_slice("s", endpoint("a", "10.0.0.7")))
    assert [(one.name, one.url, one.uid) for one in found] == [("a", "http://10.0.0.7:8000", "uid-a")]
    assert (found[0].max_in_flight, found[0].api_key, found[0].role) == (7, "k", "decode")
    assert slices(builder(suffix=".serving"), endpoint_slice("s", endpoint("a")))[0].name == "a.serving"
    # An endpoint that somebody wrote by hand has no pod.
    assert shown(slices(builder(), endpoint_slice("s", endpoint("", "10.9.9.9")))) == {
        "10.9.9.9:8000": ("10.9.9.9:8000", True)
    }


def test_one_server_in_several_slices_is_one_backend_in_its_best_state() -> None:
    four = endpoint_slice("four", endpoint("a", "10.0.0.1", ready=False), endpoint("b", "10.0.0.2", terminating=True))
    again = endpoint_slice("again", endpoint("a", "10.0.0.1", ready=True), endpoint("b", "10.0.0.2", ready=True))
    six = endpoint_slice("six", endpoint("a", "fd00::1"), family="IPv6")
    assert shown(slices(builder(), six, four, again)) == {"a": ("10.0.0.1:8000", True), "b": ("10.0.0.2:8000", True)}
    assert shown(slices(builder(), six)) == {"a": ("[fd00::1]:8000", True)}


def test_the_order_of_slices_changes_nothing() -> None:
    rng = random.Random(7)
    for _ in range(200):
        made = [
            endpoint_slice(
                f"s{number}",
                *(
                    endpoint(f"p{which}", f"10.0.0.{which}", **{key: rng.choice([True, False, None]) for key in KEYS})
                    for which in rng.sample(range(6), 3)
                ),
            )
            for number in range(4)
        ]
        expected = slices(builder(), *made)
        rng.shuffle(made)
        assert slices(builder(), *made) == expected


KEYS = ("ready", "serving", "terminating")


@pytest.mark.parametrize(
    ("wanted", "ports", "expected"),
    [
        ("", {"http": 8000}, 8000),
        ("", {"": 9000}, 9000),
        ("", {"metrics": 9000, "http": 8000}, 8000),
        (":metrics", {"metrics": 9000, "http": 8000}, 9000),
        (":9000", {"metrics": 9000, "http": 8000}, 9000),
        ("", {"metrics": 9000, "api": 8000}, "should name a port; the ports are: 9000 (metrics), 8000 (api)"),
        (":80", {"http": 8000}, "there is no port 80; the ports are: 8000 (http)"),
    ],
)
def test_the_port_is_the_only_one_or_the_named_one(wanted: str, ports: dict[str, int], expected: int | str) -> None:
    where = builder(f"kubernetes+http://service/vllm{wanted}")
    made = endpoint_slice("s", endpoint("a", "10.0.0.1"), ports=ports)
    if isinstance(expected, int):
        assert shown(slices(where, made)) == {"a": (f"10.0.0.1:{expected}", True)}
    else:
        with pytest.raises(UnclearPortError) as caught:
            slices(where, made)
        assert expected in str(caught.value)


def test_a_slice_without_the_port_hides_no_other_one() -> None:
    other = endpoint_slice("a", endpoint("a"), ports={"x": 1, "y": 2})
    assert shown(slices(builder(), other, endpoint_slice("b", endpoint("b", "10.0.0.2")))).keys() == {"b"}
    assert slices(builder(), endpoint_slice("empty")) == []
    assert slices(builder(), endpoint_slice("none", {"addresses": []})) == []


# --- pods -------------------------------------------------------------------------------------------------------------

SELECTED = "kubernetes+http://pods/app=vllm"


def test_pods_with_an_address_are_there_until_they_end() -> None:
    found = pods(
        builder(SELECTED),
        pod("a", "10.0.0.1"),
        pod("b", "10.0.0.2", ready=False),
        pod("pending", None),
        pod("leaving", "10.0.0.3", deleted=True),
        pod("failed", "10.0.0.4", phase="Failed"),
        pod("done", "10.0.0.5", phase="Succeeded"),
    )
    assert shown(found) == {"a": ("10.0.0.1:8000", True), "b": ("10.0.0.2:8000", False)}


@pytest.mark.parametrize(
    ("label", "role"),
    [
        (None, "both"),
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("both", "both"),
        ("prefill-decode", "both"),
        ("encode-prefill", "prefill"),
        ("encode-prefill-decode", "both"),
        ("encode", None),
        ("anything", "both"),
    ],
)
def test_role_comes_from_the_label(label: str | None, role: str | None) -> None:
    labels = {} if label is None else {"llm-d.ai/role": label}
    assert [one.role for one in pods(builder(SELECTED), pod("a", labels=labels))] == ([] if role is None else [role])


def test_a_port_that_no_container_declares_must_be_given_as_a_number() -> None:
    bare = pod("a", "10.0.0.1", ports={})
    assert shown(pods(builder(f"{SELECTED}:8000"), bare)) == {"a": ("10.0.0.1:8000", True)}
    with pytest.raises(UnclearPortError, match="the ports are: none"):
        pods(builder(SELECTED), bare)


# --- inference pools --------------------------------------------------------------------------------------------------


def test_each_port_of_a_pool_is_a_server_of_its_own() -> None:
    where = builder("kubernetes+http://inferencepool/qwen")
    one = inference_pool("qwen", {"app": "vllm"}, 8000, 8001)
    made = [
        pod("a", "10.0.0.1"),
        pod("b", "10.0.0.2", annotations={"llm-d.ai/active-ports": "8001, x"}),
        pod("c", "10.0.0.3", annotations={"inference.networking.k8s.io/active-ports": ""}),
    ]
    assert shown(pool(where, one, *made)) == {
        "a:8000": ("10.0.0.1:8000", True),
        "a:8001": ("10.0.0.1:8001", True),
        "b:8001": ("10.0.0.2:8001", True),
    }
    assert shown(pool(where, inference_pool("qwen", {}, 9000), made[0])) == {"a": ("10.0.0.1:9000", True)}


@pytest.mark.parametrize("text", ["²", "9" * 5_000, "8000 8001", "٨٠٠٠", "-8000", "8e3", "99999999"])
def test_ports_that_are_none_are_left_out_and_no_other_pod(text: str) -> None:
    where, one = builder("kubernetes+http://inferencepool/qwen"), inference_pool("qwen", {}, 8000)
    made = [pod("a"), pod("bad", annotations={ACTIVE_PORTS[0]: text})]
    refused: dict[str, str] = {}
    found = pool_backends(
        where, msgspec.convert(one, InferencePool), [msgspec.convert(each, Pod) for each in made], refused.__setitem__
    )
    assert shown(found) == {"a": ("10.0.0.1:8000", True)}
    assert refused == {"bad": f"its active ports name {text[:60]!r}, which is no port"}
