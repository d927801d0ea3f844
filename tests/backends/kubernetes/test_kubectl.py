"""kubectl can read the answers of the tests' API server, so that server invents no protocol."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from llmproxy.remote.cluster.election import Leadership
from llmproxy.remote.cluster.locks import KubernetesLock
from tests.backends.kubernetes.api_server import api_server, endpoint, endpoint_slice, inference_pool, pod

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


async def kubectl(home: Path, server: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "kubectl", "--server", server, "--cache-dir", str(home / "cache"), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.mark.slow
async def test_kubectl_lists_and_watches_every_kind(tmp_path: Path) -> None:
    async with api_server() as api:
        api.put("pods", pod("vllm-0", "10.0.0.1", labels={"app": "vllm"}))
        api.put("pods", pod("web-0", "10.0.0.2", labels={"app": "web"}))
        api.put("endpointslices", endpoint_slice("vllm-x", endpoint("vllm-0", ready=True, terminating=False)))
        api.put("inferencepools", inference_pool("qwen", {"app": "vllm"}, 8000))
        listed = json.loads(await kubectl(tmp_path, api.url, "get", "pods", "-l", "app=vllm", "-o", "json"))
        assert [one["metadata"]["name"] for one in listed["items"]] == ["vllm-0"]
        for kind, name in (("endpointslices", "vllm-x"), ("inferencepools.inference.networking.k8s.io", "qwen")):
            shown = await kubectl(tmp_path, api.url, "get", kind, "-o", "name")
            assert shown.strip().endswith(f"/{name}"), shown
        api.bookmarks = True
        watching = asyncio.create_task(
            kubectl(tmp_path, api.url, "get", "pods", "-w", "-o", "name", "--request-timeout", "2s")
        )
        async with asyncio.timeout(30):
            while "pods" not in api.watching:  # noqa: ASYNC110 - it has no event of its own
                await asyncio.sleep(0.01)
        api.put("pods", pod("vllm-1", "10.0.0.3", labels={"app": "vllm"}))
        assert (await watching).split() == ["pod/vllm-0", "pod/web-0", "pod/vllm-1"]


async def test_kubectl_reads_and_replaces_the_lock_of_a_cluster(tmp_path: Path) -> None:
    async with api_server() as api:
        lock = KubernetesLock(api.url, "llmproxy")
        await lock.take(Leadership("m0/1", "10.0.0.7:8090", 0), 4.0)
        shown = await kubectl(tmp_path, api.url, "get", "lease", "llmproxy", "-o", "yaml")
        for line in (
            "apiVersion: coordination.k8s.io/v1",
            "llmproxy/address: 10.0.0.7:8090",
            "name: llmproxy",
            "holderIdentity: m0/1",
            "leaseDurationSeconds: 4",
            "leaseTransitions: 1",
        ):
            assert line in shown, shown
        (tmp_path / "lease.yaml").write_text(shown.replace("m0/1", "by-hand"))
        await kubectl(tmp_path, api.url, "replace", "--validate=false", "-f", str(tmp_path / "lease.yaml"))
        assert await lock.take(Leadership("m0/1", "10.0.0.7:8090", 1), 4.0) == Leadership("by-hand", "10.0.0.7:8090", 1)
        await lock.close()
