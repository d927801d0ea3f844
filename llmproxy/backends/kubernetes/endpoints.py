"""Converts Kubernetes objects to backends.

The functions have no side effects, and the order of the objects does not matter. A terminating pod is left out: the
proxy sends it no new requests, and its streams end by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmproxy.backends.kubernetes.objects import Endpoint, EndpointSlice, InferencePool, Pod
from llmproxy.backends.registry import Instance
from llmproxy.backends.source import SHOWN_CHARS, host_port
from llmproxy.config import BackendConfig
from llmproxy.core.domain import Role

ROLE_LABEL = "llm-d.ai/role"
ROLES = {
    "prefill": Role.PREFILL,
    "encode-prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "both": Role.BOTH,
    "prefill-decode": Role.BOTH,
    "encode-prefill-decode": Role.BOTH,
}
ENCODERS = "encode"  # The value of ROLE_LABEL of encode-only workers, which answer no requests of clients.
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
_PORT = re.compile("[0-9]{1,5}")
ENDED = ("Succeeded", "Failed")
DEFAULT_PORT_NAME = "http"

Refuse = Callable[[str, str], object]
"""Called with the name of an object that is invalid, and the reason. The other objects are used all the same."""


def _ignored(name: str, why: str) -> None:
    del name, why


class UnclearPortError(Exception):
    """The port of a server is unknown: it has several ports, or no port with the wanted number or name."""


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes the backends of one source, with the settings of `template`."""

    template: BackendConfig
    scheme: str
    port: str  # A number, a name, or "" if the URL names no port.
    suffix: str = ""  # Appended to pod names, which are unique in their namespace only.

    def backend(self, name: str, host: str, port: int, uid: str, *, ready: bool, role: str | None = None) -> Instance:
        """Returns a backend, named after its pod, or after its address if `name` is "".

        `uid` identifies the process. Without `role`, the backend has the role of the template. Raises ValueError for an
        invalid address or port.
        """
        address = host_port(host, port)
        changed = {"name": name + self.suffix if name else address, "url": f"{self.scheme}://{address}"}
        changed["role"] = role or self.template.role
        return Instance.model_construct(**dict(self.template) | changed, uid=uid, ready=ready)

    def choose_port(self, ports: Iterable[tuple[str, int]]) -> int:
        """Returns the number of the configured port among `ports` (name, number).

        Without a configured port, it is the only port, or the port with the name `http`. Raises UnclearPortError.
        """
        known = list(dict.fromkeys(ports))
        wanted = self.port or (DEFAULT_PORT_NAME if len(known) > 1 else "")
        fitting = [number for name, number in known if wanted in (name, str(number), "")]
        if fitting:
            return fitting[0]
        if not known and self.port.isdecimal():
            # Containers need not declare their ports.
            return int(self.port)
        said = ", ".join(f"{number} ({name})" if name else str(number) for name, number in known) or "none"
        advice = f"there is no port {self.port}" if self.port else "the url should name a port"
        raise UnclearPortError(f"{advice}; the ports are: {said}")


def service_backends(builder: Builder, slices: Iterable[EndpointSlice], refuse: Refuse = _ignored) -> list[Instance]:
    """Returns the servers behind a Service.

    A server may be in several slices: during a change, or because a dual-stack pod has a slice for each address family.
    The entry with the best state counts, then the entry with the IPv4 address. Raises UnclearPortError if a slice has
    no clear port and no server was found.
    """
    found: dict[tuple[str, int], tuple[bool, Instance]] = {}
    unclear: UnclearPortError | None = None
    for one in sorted(slices, key=lambda each: each.metadata.name):
        ports = [(port.name or "", port.port) for port in one.ports or () if port.port and port.protocol in TCP]
        for endpoint in one.endpoints or ():
            if not endpoint.addresses:
                continue
            try:
                port = builder.choose_port(ports)
            except UnclearPortError as error:
                unclear = error
                refuse(one.metadata.name, str(error))
                break
            target, host = endpoint.target_ref, endpoint.addresses[0]
            named = target is not None and target.uid
            key = (target.uid if target is not None and named else host, port)
            ready, ends = _state(endpoint)
            name = target.name if target is not None and named else ""
            try:
                backend = builder.backend(name, host, port, key[0], ready=ready)
            except ValueError as error:
                refuse(name or one.metadata.name, str(error))
                continue
            found[key] = min((ends, backend), found.get(key, (ends, backend)), key=_worse)
    if unclear is not None and not found:
        raise unclear
    return _sorted(backend for ends, backend in found.values() if not ends)


TCP = (None, "TCP")


def _state(endpoint: Endpoint) -> tuple[bool, bool]:
    """Returns whether an endpoint is ready, and whether it is terminating.

    Missing conditions mean ready and not terminating (KEP-1672).
    """
    conditions = endpoint.conditions
    return conditions.ready is not False, bool(conditions.terminating)


def _worse(state: tuple[bool, Instance]) -> tuple[bool, bool, bool, str]:
    ends, backend = state
    return ends, not backend.ready, "[" in backend.url, backend.url


def pod_backends(builder: Builder, pods: Iterable[Pod], refuse: Refuse = _ignored) -> list[Instance]:
    """Returns the servers of these pods. Raises UnclearPortError if a pod has no clear port and no server was found."""
    found: list[Instance] = []
    unclear: UnclearPortError | None = None
    for pod in filter(_serves, pods):
        ports = (
            (port.name or "", port.container_port)
            for container in pod.spec.containers or ()
            for port in container.ports or ()
            if port.protocol in TCP
        )
        try:
            found.append(_backend(builder, pod, builder.choose_port(ports)))
        except (UnclearPortError, ValueError) as error:
            unclear = error if isinstance(error, UnclearPortError) else unclear
            refuse(pod.metadata.name, str(error))
    if unclear is not None and not found:
        raise unclear
    return _sorted(found)


def pool_backends(
    builder: Builder, pool: InferencePool, pods: Iterable[Pod], refuse: Refuse = _ignored
) -> list[Instance]:
    """Returns the servers of an InferencePool.

    Each pod has one server for each target port, unless its annotation names fewer ports.
    """
    numbers = [port.number for port in pool.spec.target_ports if port.number]
    found = []
    for pod in filter(_serves, pods):
        active = _active_ports(pod, refuse)
        for number in numbers:
            if active is None or number in active:
                name = pod.metadata.name if len(numbers) == 1 else f"{pod.metadata.name}:{number}"
                try:
                    found.append(_backend(builder, pod, number, name))
                except ValueError as error:
                    refuse(name, str(error))
    return _sorted(found)


def _backend(builder: Builder, pod: Pod, port: int, name: str | None = None) -> Instance:
    role = ROLES.get((pod.metadata.labels or {}).get(ROLE_LABEL, ""))
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
    return builder.backend(
        name or pod.metadata.name, pod.status.pod_ip or "", port, pod.metadata.uid, ready=ready, role=role
    )  # fmt: skip


def _serves(pod: Pod) -> bool:
    """Returns whether the pod has an IP, has not ended, is not terminating and is not an encode-only worker."""
    ends = pod.metadata.deletion_timestamp is not None or pod.status.phase in ENDED
    return bool(pod.status.pod_ip) and not ends and (pod.metadata.labels or {}).get(ROLE_LABEL) != ENCODERS


def _active_ports(pod: Pod, refuse: Refuse) -> set[int] | None:
    """Returns the ports in a pod's annotation; None without an annotation. Passes invalid parts to `refuse`."""
    annotations = pod.metadata.annotations or {}
    text = next((annotations[name] for name in ACTIVE_PORTS if name in annotations), None)
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if part and not _PORT.fullmatch(part)), None)
    if wrong is not None:
        refuse(pod.metadata.name, f"its active ports name {wrong[:SHOWN_CHARS]!r}, which is no port")
    return {int(part) for part in parts if _PORT.fullmatch(part)}


def _sorted(backends: Iterable[Instance]) -> list[Instance]:
    return sorted(backends, key=lambda backend: backend.name)
