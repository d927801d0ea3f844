"""Kubernetes objects, reduced to the fields that decide where requests may go.

API versions: discovery.k8s.io/v1 (EndpointSlice), v1 (Pod), inference.networking.k8s.io/v1 (InferencePool), v1alpha2
(InferenceObjective, InferenceModelRewrite). Lists and mappings without entries may be null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class Metadata(Struct, rename="camel", frozen=True):
    name: str
    uid: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class Conditions(Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(Struct, frozen=True):
    name: str = ""
    uid: str = ""


class Endpoint(Struct, rename="camel", frozen=True):
    addresses: list[str]
    conditions: Conditions = Conditions()
    target_ref: TargetRef | None = None


class Port(Struct, frozen=True):
    """A port of an EndpointSlice (`port`), or a target port of an InferencePool (`number`)."""

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
    containers: list[Container] | None = None


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


# --- the inference extension ------------------------------------------------------------------------------------------


class CustomObject(Struct, frozen=True):
    """An object of a custom resource.

    Its `spec` is decoded later, so that one invalid object does not make the whole list unreadable.
    """

    metadata: Metadata
    spec: Any = None


class PoolRef(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    group: str = "inference.networking.k8s.io"
    kind: str = "InferencePool"


class PoolRefs(Struct, rename="camel", frozen=True):
    """The fields by which an object refers to InferencePools."""

    pool_ref: PoolRef | None = None
    pool_refs: list[PoolRef] | None = None
    pool_selector: dict[str, Any] | None = None


# An unknown field may narrow the meaning of an object, so an object with unknown fields is rejected.
class ObjectiveSpec(PoolRefs, frozen=True, forbid_unknown_fields=True):
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None


ModelName = Annotated[str, Meta(min_length=1, max_length=512)]


class ModelMatch(Struct, frozen=True, forbid_unknown_fields=True):
    value: ModelName
    type: Literal["Exact"] | None = None


class Match(Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelMatch


class TargetModel(Struct, rename="camel", frozen=True, forbid_unknown_fields=True):
    model_rewrite: ModelName
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RewriteRule(Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of an InferenceModelRewrite. A rule without `matches` applies to every model."""

    matches: list[Match] | None = None
    targets: list[TargetModel] | None = None


class RewriteSpec(PoolRefs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rules: list[RewriteRule]
