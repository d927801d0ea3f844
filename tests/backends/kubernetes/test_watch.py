"""A collection watched for months: the effect of each rule of the protocol on the backends."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trustme
from structlog.testing import capture_logs

from llmproxy.backends.kubernetes import api as api_module
from llmproxy.backends.kubernetes import watched
from llmproxy.backends.kubernetes.api import KubernetesApi
from llmproxy.backends.kubernetes.source import KubernetesSource
from llmproxy.backends.source import SourceFailedError
from llmproxy.config import BackendConfig
from tests.backends.kubernetes.api_server import ApiServer, api_server, endpoint, endpoint_slice, inference_pool, pod

SLICES = "endpointslices"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PAUSE_MIN_S", 0.001)
    monkeypatch.setattr(watched, "PAUSE_MAX_S", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as api:
        yield api


class Follower:
    """A source, with the result of its last look or its failure."""

    def __init__(self, server: str | None, url: str, account: Path) -> None:
        self.source = KubernetesSource(BackendConfig(url=url), KubernetesApi(server, account))
        self.found: dict[str, str] | None = None
        self.failures: list[str] = []
        self.looks = 0
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            try:
                backends = await self.source.query()
            except SourceFailedError as error:
                self.failures.append(str(error))
            else:
                self.found = {one.name: one.url.removeprefix("http://") for one in backends}
            self.looks += 1

    async def until(self, *names: str) -> None:
        await until(lambda: self.found is not None and set(self.found) == set(names))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.source.close()


@pytest.fixture
async def follow(server: ApiServer, tmp_path: Path) -> AsyncIterator[Callable[..., Follower]]:
    made: list[Follower] = []

    def start(url: str = "kubernetes+http://service/vllm") -> Follower:
        made.append(Follower(server.url, url, tmp_path))
        return made[-1]

    yield start
    for one in made:
        await one.close()


@pytest.fixture
async def one(server: ApiServer, follow: Callable[..., Follower]) -> Follower:
    """A source that has found `a`, and watches."""
    server.put(SLICES, has("a"))
    started = follow()
    await started.until("a")
    await until(lambda: server.watching)
    return started


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0.001)


def has(*names: str) -> dict[str, object]:
    return endpoint_slice("s", *(endpoint(name, f"10.0.0.{ord(name)}") for name in names))


def asked(server: ApiServer, **wanted: str) -> list[dict[str, str]]:
    return [query for query in server.asked if wanted.items() <= query.items()]


async def test_a_list_then_every_event(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.put(SLICES, has("a"))
    server.put(SLICES, endpoint_slice("other", endpoint("x"), service="other"))
    one = follow()
    await one.until("a")
    server.put(SLICES, has("a", "b"))
    await one.until("a", "b")
    server.put(SLICES, has("b"))
    await one.until("b")
    server.delete(SLICES, "s")
    await one.until()
    assert len(asked(server, kind=SLICES)) == 2
    assert server.asked[0]["path"] == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    assert server.asked[0]["labelSelector"] == "kubernetes.io/service-name=vllm"
    assert server.asked[1]["allowWatchBookmarks"] == "true"


async def test_object_added_to_an_empty_collection_is_known(server: ApiServer, follow: Callable[..., Follower]) -> None:
    one = follow("kubernetes+http://pods/app=vllm")
    await one.until()
    for _ in range(2):
        server.put("pods", pod("a", labels={"app": "vllm"}))
        await one.until("a")
        server.delete("pods", "a")
        await one.until()
    assert len(asked(server, kind="pods")) == 2, "no second list"


async def test_a_watch_that_ends_goes_on_from_its_last_version(server: ApiServer, one: Follower) -> None:
    server.put(SLICES, has("b"))
    await one.until("b")
    version = str(server.version)
    server.put("pods", pod("unrelated"))
    await until(lambda: server.watching)
    server.cut()
    await until(lambda: len(asked(server, watch="true")) >= 2)
    assert asked(server, watch="true")[1]["resourceVersion"] == version
    server.put(SLICES, has("b", "c"))
    await one.until("b", "c")
    assert len(asked(server, kind=SLICES)) - len(asked(server, watch="true")) == 1, "it was listed once"


async def test_a_bookmark_moves_the_version(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.put(SLICES, has("a"))
    server.bookmarks = True
    one = follow()
    await one.until("a")
    for number in range(5):
        server.put("pods", pod(f"unrelated-{number}"))
    await until(lambda: server.watching)
    server.cut()
    await until(lambda: len(asked(server, watch="true")) >= 2)
    server.cut()
    await until(lambda: len(asked(server, watch="true")) >= 3)
    assert asked(server, watch="true")[-1]["resourceVersion"] == str(server.version)


async def test_a_version_that_is_gone_means_to_list_again(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.put(SLICES, has("a"))
    server.put(SLICES, endpoint_slice("t", endpoint("b", "10.0.0.2")))
    one = follow()
    await one.until("a", "b")
    await until(lambda: server.watching)
    # No event tells of what went meanwhile; the difference of two lists does.
    server.vanish(SLICES, "s")
    server.cut()
    await one.until("b")
    assert one.failures == [], "that is no failure"


async def test_half_an_event_is_asked_for_again(server: ApiServer, one: Follower) -> None:
    server.cut(json.dumps({"type": "MODIFIED", "object": has("x")}).encode()[:60])
    server.put(SLICES, has("b"))
    await one.until("b")


@pytest.mark.parametrize("status", [500, 503, 403, 429])
async def test_backends_stay_while_the_server_is_away(status: int, server: ApiServer, one: Follower) -> None:
    server.refuses = status
    server.cut()
    await until(lambda: one.failures)
    assert f"answered {status}" in one.failures[0]
    assert one.found is not None
    assert one.found.keys() == {"a"}
    asks = len(server.asked)
    await until(lambda: len(server.asked) > asks + 3)
    # It is said once, however often it is tried.
    assert len(one.failures) == 1
    server.refuses = None
    server.put(SLICES, has("a", "b"))
    await one.until("a", "b")


async def test_a_server_that_refuses_connections_changes_nothing(
    server: ApiServer, one: Follower, unused_tcp_port: int
) -> None:
    right, one.source._api._url = one.source._api._url, f"http://127.0.0.1:{unused_tcp_port}"
    server.cut()
    await until(lambda: any("a request to the API server" in why for why in one.failures))
    one.source._api._url = right
    server.put(SLICES, has("b"))
    await one.until("b")


async def test_a_watch_in_silence_is_lost(
    server: ApiServer, follow: Callable[..., Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched.Watched.__init__, "__defaults__", (0.05,))
    server.put(SLICES, has("a"))
    server.silent = True
    one = follow()
    await one.until("a")
    await until(lambda: server.watching)
    server.put(SLICES, has("b"))
    await until(lambda: len(asked(server, watch="true")) >= 2)
    server.silent = False
    await one.until("b")


async def test_the_own_cluster_gets_the_token_as_it_is_at_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("old\n")
    (tmp_path / "namespace").write_text("serving")
    async with api_server(tls) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        server.token = "old"
        server.put(SLICES, has("a"))
        one = Follower(None, "kubernetes+http://service/vllm", tmp_path)
        await one.until("a")
        assert server.asked[0]["path"] == "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
        await until(lambda: server.watching)
        server.token = "new"
        server.cut()
        await until(lambda: any("the token of the service account is not accepted" in why for why in one.failures))
        (tmp_path / "token").write_text("new")
        server.put(SLICES, has("a", "b"))
        await one.until("a", "b")
        await one.close()


async def test_another_server_gets_no_token(server: ApiServer, follow: Callable[..., Follower], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    # Not read: it is no certificate.
    (tmp_path / "ca.crt").write_text("")
    server.put(SLICES, has("a"))
    await follow().until("a")
    assert set(server.tokens) == {""}


async def test_another_server_is_not_verified_with_the_ca_of_the_own_cluster(tmp_path: Path) -> None:
    ca, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    async with api_server(tls) as server:
        api = KubernetesApi(server.url, tmp_path)
        with pytest.raises(api_module.ApiError, match="certificate verify failed"):
            await api.send("GET", "/api")
        await api.close()
        assert not server.asked


async def test_an_event_longer_than_any_buffer(server: ApiServer, one: Follower) -> None:
    large = endpoint_slice("s", *(endpoint(f"p{n}", f"10.{n >> 8}.{n & 255}.1") for n in range(1_000)))
    large["metadata"]["annotations"] = {"filler": "x" * 6_000_000}
    server.put(SLICES, large)
    await until(lambda: one.found is not None and len(one.found) == 1_000)
    large["metadata"]["annotations"] = {"filler": "x" * 9_000_000}
    server.put(SLICES, large)
    await until(lambda: one.failures)
    assert "has more than 8 MiB" in one.failures[0]
    server.put(SLICES, has("b"))
    server.compact()
    await one.until("b")


@pytest.mark.parametrize(
    "line",
    [
        b"<html>502 Bad Gateway</html>\n",
        b'{"type": "MODIFIED"}\n',
        b'{"type": "ADDED", "object": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}\n",
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd has no leader"}}\n',
    ],
)
async def test_nonsense_is_said_and_changes_nothing(line: bytes, server: ApiServer, one: Follower) -> None:
    await server.say(line)
    await until(lambda: one.failures)
    server.put(SLICES, has("a", "b"))
    await one.until("a", "b")
    # Later events refer to objects that could not be read, so the collection is listed again.
    lists = len(asked(server, kind=SLICES)) - len(asked(server, watch="true"))
    assert ("cannot be read" in one.failures[0], lists) == (True, 2) or "etcd has no leader" in one.failures[0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (pod("bad", "10.0.0.7:99/x?y#"), "'10.0.0.7:99/x?y#' is no address"),
        (pod("bad", "exa mple"), "'exa mple' is no address"),
        (pod("bad", "::::"), "At most one '::' permitted in '::::'"),
        (pod("bad", ports={"http": 70_000}), "70000 is no port"),
        (pod("bad", ports={"a": 1, "b": 2}), "the url should name a port; the ports are: 1 (a), 2 (b)"),
        (pod("bad") | {"spec": {"containers": 5}}, "Expected `array | null`, got `int` - at `$.spec.containers`"),
        (pod("bad", labels={"app": "vllm"}) | {"status": []}, "Expected `object`, got `array` - at `$.status`"),
    ],
)
async def test_an_object_that_is_wrong_is_left_out_and_no_other_one(
    wrong: dict[str, object], why: str, server: ApiServer, follow: Callable[..., Follower]
) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.put("pods", wrong)
    url = "kubernetes+http://pods/app!=x"
    with capture_logs() as lines:
        one = follow(url)
        await one.until("a")
        server.put("pods", pod("b", "10.0.0.2"))
        await one.until("a", "b")
        server.delete("pods", "a")
        await one.until("b")
    assert one.failures == []
    refused = [(line["object"].rpartition("/")[2], line["why"]) for line in lines if line["event"] == "object_refused"]
    assert refused == [("bad", why)], "it is said once"


async def test_an_object_that_becomes_wrong_stays_as_it_was(server: ApiServer, follow: Callable[..., Follower]) -> None:
    pools = "inferencepools"
    server.put(pools, inference_pool("qwen", {"app": "vllm"}, 8000))
    server.put("pods", pod("a", labels={"app": "vllm"}))
    one = follow("kubernetes+http://inferencepool/qwen")
    await one.until("a")
    wrong = inference_pool("qwen", {"app": "vllm"}, 8000)
    wrong["spec"]["targetPorts"] = 8000
    server.put(pools, wrong)
    server.put("pods", pod("a", labels={"app": "vllm"}) | {"status": []})
    server.put("pods", pod("b", labels={"app": "vllm"}))
    await one.until("a", "b")
    # The whole collection is listed again.
    server.compact()
    server.cut()
    server.put("pods", pod("c", labels={"app": "vllm"}))
    await one.until("a", "b", "c")
    server.delete("pods", "a")
    await one.until("b", "c")
    assert one.failures == []


async def test_a_pool_that_is_wrong_from_the_start_is_a_failure(
    server: ApiServer, follow: Callable[..., Follower]
) -> None:
    wrong = inference_pool("qwen", {"app": "vllm"}, 8000)
    wrong["spec"]["selector"] = []
    server.put("inferencepools", wrong)
    one = follow("kubernetes+http://inferencepool/qwen")
    await until(lambda: one.failures)
    assert "the InferencePool is invalid: Expected `object`, got `array` - at `$.spec.selector`" in one.failures[0]
    assert one.found is None, "no backend leaves"


async def test_an_object_without_a_name_hides_no_other_one(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.objects["pods"]["nameless"] = {"metadata": {"name": 7}}
    one = follow("kubernetes+http://pods/app!=x")
    await one.until("a")
    assert one.failures == []


async def test_pods_need_not_declare_containers(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.put("pods", pod("a", "10.0.0.1") | {"spec": {}})
    await follow("kubernetes+http://pods/app!=x:8000").until("a")


async def test_many_changes_are_gathered(server: ApiServer, one: Follower) -> None:
    before = one.looks
    for number in range(2_000):
        server.put(SLICES, has("a", "b") if number % 2 else has("a"))
    await one.until("a", "b")
    assert one.looks - before < 200


async def test_pods_of_a_selector(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.put("pods", pod("a", "10.0.0.1", labels={"app": "vllm"}))
    server.put("pods", pod("other", "10.0.0.9", labels={"app": "web"}))
    one = follow("kubernetes+http://pods/app=vllm")
    await one.until("a")
    server.put("pods", pod("b", "10.0.0.2", labels={"app": "vllm"}))
    await one.until("a", "b")
    server.put("pods", pod("a", "10.0.0.1", labels={"app": "vllm"}, deleted=True))
    await one.until("b")


async def test_pods_follow_the_selector_of_their_pool(server: ApiServer, follow: Callable[..., Follower]) -> None:
    for name in ("a", "b"):
        server.put("pods", pod(name, f"10.0.0.{ord(name)}", labels={"app": name, "model": "qwen"}))
    server.put("inferencepools", inference_pool("other", {"app": "x"}, 1))
    server.put("inferencepools", inference_pool("qwen", {"app": "a", "model": "qwen"}, 8000))
    one = follow("kubernetes+http://inferencepool/qwen")
    await one.until("a")
    assert asked(server, kind="pods")[0]["labelSelector"] == "app=a,model=qwen"
    server.put("inferencepools", inference_pool("qwen", {"model": "qwen"}, 9000))
    await one.until("a", "b")
    assert one.found == {"a": "10.0.0.97:9000", "b": "10.0.0.98:9000"}
    server.delete("inferencepools", "qwen")
    await one.until()
    assert server.watching.count("pods") == 1


async def test_a_cluster_without_the_kind_says_so(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.missing.add("inferencepools")
    one = follow("kubernetes+http://inferencepool/qwen")
    await until(lambda: one.failures)
    assert "this cluster has no inferencepools" in one.failures[0]
    server.missing.clear()
    await one.until()


async def test_another_namespace_is_part_of_the_name(server: ApiServer, follow: Callable[..., Follower]) -> None:
    server.put(SLICES, has("a"))
    one = follow("kubernetes+http://serving/service/vllm")
    await one.until("a.serving")
    assert server.asked[0]["path"] == "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"


async def test_backends_that_could_not_be_used_are_returned_again(
    one: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmproxy.backends.kubernetes.source.REPEAT_S", 0.0)
    one.found = None
    one.source.repeat()
    await one.until("a")


async def test_outside_of_a_cluster_the_server_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    source = KubernetesSource(BackendConfig(url="kubernetes+http://service/vllm"), KubernetesApi(None, tmp_path))
    with pytest.raises(SourceFailedError, match=r"discovery\.kubernetes_api"):
        await source.query()
    await source.close()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert KubernetesApi(None)._server() == "https://[fd00::1]:443"
    assert api_module.ACCOUNT.is_absolute()
