"""URLs that name pods: parts of valid URLs, and messages for wrong URLs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from llmproxy.config import BackendConfig, Config
from llmproxy.config.pods_url import PodsUrl


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("kubernetes+http://service/vllm", ("http", None, "service", "vllm", "")),
        ("kubernetes+https://svc/vllm:api", ("https", None, "service", "vllm", "api")),
        ("KUBERNETES+HTTP://serving/services/vllm:8000/", ("http", "serving", "service", "vllm", "8000")),
        ("kubernetes+http://pods/app=vllm,tier in (a, b):80", ("http", None, "pods", "app=vllm,tier in (a, b)", "80")),
        ("kubernetes+http://pods/llm-d.ai/role=decode", ("http", None, "pods", "llm-d.ai/role=decode", "")),
        ("kubernetes+http://x/po/a.b/c!=d", ("http", "x", "pods", "a.b/c!=d", "")),
        ("kubernetes+http://inferencepool/qwen", ("http", None, "inferencepool", "qwen", "")),
    ],
)
def test_it_is_read_as_kubectl_writes(url: str, expected: tuple[str | None, ...]) -> None:
    found = PodsUrl.of(url)
    assert (found.scheme, found.namespace, found.kind, found.name, found.port) == expected
    assert PodsUrl.of(found.text) == found
    backend = BackendConfig(url=url)
    assert (backend.url, backend.name, backend.looked_up) == (found.text, found.text, True)
    assert backend.by_https is (found.scheme == "https")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kubernetes+http://vllm:8000", "should be kubernetes+http://[NAMESPACE/]TYPE/NAME[:PORT]"),
        ("kubernetes+ftp://service/vllm", "should be kubernetes+http://[NAMESPACE/]TYPE/NAME[:PORT]"),
        ("kubernetes+http://servic/vllm", '(nearest: "service")'),
        ("kubernetes+http://serving/infrencepool/q", '(nearest: "inferencepool")'),
        ("kubernetes+http://service/Vllm", "'Vllm' is no name of Kubernetes"),
        ("kubernetes+http://service/a/../b", "is no name of Kubernetes"),
        ("kubernetes+http://a?b/service/c", "'a?b' is no name of Kubernetes"),
        ("kubernetes+http://pods/vllm", "should be a label selector, such as app=vllm"),
        ("kubernetes+http://service/vllm:0", "0 is no port"),
        ("kubernetes+http://service/vllm:99999", "99999 is no port"),
        (f"kubernetes+http://service/vllm:{'9' * 5_000}", "9 is no port"),
        ("kubernetes+http://inferencepool/q:8000", "should hold no port: an InferencePool has its own"),
    ],
)
def test_wrong_urls_are_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(ValueError, match="url") as caught:
        BackendConfig(url=url)
    assert words in str(caught.value)


def test_two_services_may_stand_side_by_side() -> None:
    urls = ["kubernetes+http://service/a", "kubernetes+http://service/b"]
    assert [one.url for one in Config.model_validate({"backends": urls}).backends] == urls
    with pytest.raises(ValidationError, match="given twice"):
        Config.model_validate({"backends": [urls[0], urls[0]]})
