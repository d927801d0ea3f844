"""Parses URLs that name pods of a Kubernetes cluster, in the notation of kubectl: TYPE/NAME."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

KUBERNETES = "kubernetes+"  # Prefix of a URL that names pods.
SERVICE, PODS, INFERENCE_POOL = "service", "pods", "inferencepool"
NAMES = {
    **dict.fromkeys(("service", "services", "svc"), SERVICE),
    **dict.fromkeys(("pods", "pod", "po"), PODS),
    **dict.fromkeys(("inferencepool", "inferencepools", "infpool"), INFERENCE_POOL),
}
"""Names of types that kubectl accepts, with the type."""

_URL = re.compile(r"kubernetes\+(https?)://([^/]+)/(.+?)(?::([a-z0-9-]+))?/?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_SHAPE = "should be kubernetes+http://[NAMESPACE/]TYPE/NAME[:PORT], such as kubernetes+http://service/vllm"


@dataclass(frozen=True, slots=True)
class PodsUrl:
    """A URL that names the pods of a Service, an InferencePool or a label selector."""

    scheme: str
    # Namespace of the object; None: the namespace of the proxy.
    namespace: str | None
    # `SERVICE`, `PODS` or `INFERENCE_POOL`.
    kind: str
    # Name of the Service or InferencePool; for `PODS`, a label selector.
    name: str
    # Number or name of the port; empty if the URL names none.
    port: str

    @classmethod
    def of(cls, url: str) -> PodsUrl:
        """Parses a URL. Raises ValueError with the expected form for a URL that names no pods."""
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError(f"{url!r} {_SHAPE}")
        scheme, first, name, port = found.groups(default="")
        # Keys of labels have a slash too: pods/llm-d.ai/role=decode.
        namespace, word = None, first
        if first.lower() not in NAMES and "/" in name:
            namespace, (word, _, name) = first, name.partition("/")
        kind = NAMES.get(word.lower())
        if kind is None:
            meant = NAMES[get_close_matches(word.lower(), NAMES, n=1, cutoff=0.0)[0]]
            known = f"{SERVICE}, {PODS}, {INFERENCE_POOL}"
            raise ValueError(f'{url!r}: {word!r} is none of {known} (nearest: "{meant}"); it {_SHAPE}')
        for text in filter(None, (namespace, None if kind == PODS else name)):
            if _NAME.fullmatch(text) is None:
                raise ValueError(f"{url!r}: {text!r} is no name of Kubernetes (a-z, 0-9, - and .); it {_SHAPE}")
        if kind == PODS and "=" not in name and not re.search(r"\s(not)?in\s", name):
            raise ValueError(f"{url!r}: {name!r} should be a label selector, such as app=vllm")
        if kind == INFERENCE_POOL and port:
            raise ValueError(f"{url!r} should hold no port: an InferencePool has its own")
        if port.isdecimal() and not (len(port) < 6 and 0 < int(port) < 1 << 16):
            raise ValueError(f"{url!r}: {port} is no port")
        return cls(scheme.lower(), namespace, kind, name, port)

    @property
    def text(self) -> str:
        """The URL in its usual spelling, without aliases of types such as `svc`."""
        namespace = f"{self.namespace}/" if self.namespace else ""
        port = f":{self.port}" if self.port else ""
        return f"{KUBERNETES}{self.scheme}://{namespace}{self.kind}/{self.name}{port}"
