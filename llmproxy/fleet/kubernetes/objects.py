"""The parts of Kubernetes' objects that say where requests may go.

EndpointSlice is that of discovery.k8s.io/v1, Pod that of v1, and InferencePool that of inference.networking.k8s.io/v1.
Lists and mappings without entries may be null.
"""

from __future__ import annotations

from msgspec import Struct


class Metadata(Struct, rename="camel", frozen=True):
    name: str
    uid: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class Conditions(Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Target(Struct, frozen=True):
    name: str = ""
    uid: str = ""


class Endpoint(Struct, rename="camel", frozen=True):
    addresses: list[str]
    conditions: Conditions = Conditions()
    target_ref: Target | None = None


class Port(Struct, frozen=True):
    """A port of a slice, or of an InferencePool's targets (`number`)."""

    port: int | None = None
    number: int | None = None
    name: str | None = None
    protocol: str | None = None


class EndpointSlice(Struct, rename="camel", frozen=True):
    metadata: Metadata
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class ContainerPort(Struct, rename="camel", frozen=True):
    container_port: int
    name: str | None = None
    protocol: str | None = None


class Container(Struct, frozen=True):
    ports: list[ContainerPort] | None = None


class PodSpec(Struct, frozen=True):
    containers: list[Container]


class PodCondition(Struct, frozen=True):
    type: str
    status: str


class PodStatus(Struct, rename={"pod_ip": "podIP"}, frozen=True):
    phase: str = ""
    pod_ip: str | None = None
    conditions: list[PodCondition] | None = None


class Pod(Struct, frozen=True):
    metadata: Metadata
    spec: PodSpec
    status: PodStatus = PodStatus()


class Selector(Struct, rename="camel", frozen=True):
    match_labels: dict[str, str]


class InferencePoolSpec(Struct, rename="camel", frozen=True):
    selector: Selector
    target_ports: list[Port]


class InferencePool(Struct, frozen=True):
    metadata: Metadata
    spec: InferencePoolSpec
