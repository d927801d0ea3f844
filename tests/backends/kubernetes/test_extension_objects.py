"""Objects of the inference extension while they change, and while the API server refuses or is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.backends.kubernetes import extension_objects, watched
from llmproxy.backends.kubernetes.extension_objects import ExtensionObjects
from llmproxy.config import Config, Entries
from tests.backends.kubernetes.api_server import ApiServer, api_server, objective, rewrite, rule
from tests.backends.kubernetes.test_watch import until

KINDS = ("inferenceobjectives", "inferencemodelrewrites", "old.inferenceobjectives", "old.inferencemodelrewrites")
OBJECTIVES, REWRITES, OLD_OBJECTIVES, OLD_REWRITES = KINDS
POOL = "kubernetes+http://inferencepool/qwen"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PAUSE_MIN_S", 0.001)
    monkeypatch.setattr(watched, "PAUSE_MAX_S", 0.01)
    monkeypatch.setattr(extension_objects, "GATHER_S", 0.001)


class Follower:
    """The taken entries, and each line of the log as `event field=value ...`."""

    def __init__(self, server: ApiServer, lines: list[Any]) -> None:
        self.server = server
        self.taken: list[Entries] = []
        self.awaited: list[bool] = []
        self._lines = lines
        self.objects = ExtensionObjects(self.taken.append, lambda: self.awaited.append(self.objects.awaited))

    def follow(self, *backends: str, api: str | None = None) -> None:
        discovery = {"kubernetes_api": api or self.server.url}
        self.objects.reconfigure(Config.model_validate({"backends": backends, "discovery": discovery}))

    @property
    def says(self) -> dict[str, Any]:
        last = self.taken[-1] if self.taken else Entries()
        return {one.name: one.criticality for _, one in last.objectives} | {
            one.name: one.stands_for for _, one in last.models
        }

    def lines(self, event: str) -> list[Any]:
        return [line for line in self._lines if line["event"] == event]

    async def until(self, **wanted: Any) -> None:
        await until(lambda: self.says == wanted)

    async def finds_one(self) -> None:
        """Follow a pool with one objective."""
        self.server.put(OBJECTIVES, objective("batch", 1))
        self.follow(POOL)
        await self.until(batch=1)


@pytest.fixture
async def follower() -> AsyncIterator[Follower]:
    async with api_server() as server:
        with capture_logs() as lines:
            one = Follower(server, lines)
            yield one
            await one.objects.close()


async def test_objects_are_followed_as_they_change(follower: Follower) -> None:
    server = follower.server
    server.put(OBJECTIVES, objective("batch", -10))
    server.put(OBJECTIVES, objective("other", 1, pool="other"))
    follower.follow("http://a", POOL, "kubernetes+http://service/vllm")
    assert (follower.objects.awaited, follower.objects.answered.is_set()) == (True, False)
    await follower.until(batch=-10)
    await follower.objects.answered.wait()
    assert follower.awaited[-1] is False
    server.put(REWRITES, rewrite("r", rule("chat", new=1, old=9)))
    await follower.until(batch=-10, chat={"new": 1, "old": 9})
    server.put(OBJECTIVES, objective("batch", 20))
    server.put(REWRITES, rewrite("r", rule("chat", new=None)))
    await follower.until(batch=20, chat="new")
    server.delete(OBJECTIVES, "batch")
    await follower.until(chat="new")
    # No event tells of what went meanwhile; the difference of two lists does.
    server.vanish(REWRITES, "r")
    server.cut()
    await follower.until()
    assert server.asked[0]["path"].startswith("/apis/llm-d.ai/v1alpha2/namespaces/default/")
    assert follower.lines("discovery_failed") == []


async def test_event_without_a_change_is_not_passed_on(follower: Follower) -> None:
    server = follower.server
    await follower.finds_one()
    server.put(OBJECTIVES, objective("batch", 1) | {"status": {"conditions": []}})
    server.put(OBJECTIVES, objective("other", 1, pool="other"))
    server.put(OBJECTIVES, objective("last", 1))
    await follower.until(batch=1, last=1)
    assert len(follower.taken) == 2


async def test_the_deprecated_group_is_read_too(follower: Follower) -> None:
    server = follower.server
    server.put(OLD_OBJECTIVES, objective("batch", -1))
    server.put(OLD_OBJECTIVES, objective("both", -1))
    server.put(OBJECTIVES, objective("both", 1))
    server.put(OLD_REWRITES, rewrite("r", rule("chat", old=None)))
    follower.follow(POOL)
    await follower.until(batch=-1, both=1, chat="old")


async def test_a_cluster_without_the_kinds_says_so_once_and_may_get_them(follower: Follower) -> None:
    server = follower.server
    server.missing |= set(KINDS)
    follower.follow(POOL)
    await follower.objects.answered.wait()
    assert (follower.taken, follower.objects.awaited) == ([], False)
    asks = len(server.asked)
    await until(lambda: len(server.asked) > asks + 12)
    assert [line["objects"] for line in follower.lines("no_such_objects")] == [REWRITES, OBJECTIVES]
    assert {line["log_level"] for line in follower.lines("no_such_objects")} == {"info"}
    server.missing.discard(OBJECTIVES)
    server.put(OBJECTIVES, objective("batch", 1))
    await follower.until(batch=1)
    assert len(follower.lines("no_such_objects")) == 2
    assert follower.lines("discovery_failed") == follower.lines("discovery_recovered") == []


async def test_one_group_is_enough(follower: Follower) -> None:
    server = follower.server
    server.missing |= {OLD_OBJECTIVES, OLD_REWRITES}
    await follower.finds_one()
    assert [line["event"] for line in follower._lines] == []


async def test_kinds_that_are_deleted_take_their_objects_along(follower: Follower) -> None:
    server = follower.server
    await follower.finds_one()
    server.missing.add(OBJECTIVES)
    server.cut()
    await follower.until()


async def test_a_missing_right_is_said_once_as_the_rule_that_gives_it(follower: Follower) -> None:
    server = follower.server
    server.refused[REWRITES] = 403
    await follower.finds_one()
    assert follower.objects.awaited is False, "nothing is going to turn up"
    asks = len(server.asked)
    await until(lambda: len(server.asked) > asks + 6)
    server.put(OBJECTIVES, objective("batch", 2))
    await follower.until(batch=2)
    (line,) = follower.lines("discovery_failed")
    assert line["source"] == "inferencemodelrewrites.llm-d.ai in default"
    assert "{apiGroups: [llm-d.ai], resources: [inferencemodelrewrites], verbs: [list, watch]}" in line["why"]
    server.refused.clear()
    server.put(REWRITES, rewrite("r", rule("chat", new=None)))
    await follower.until(batch=2, chat="new")
    assert [line["source"] for line in follower.lines("discovery_recovered")] == [line["source"]]


async def test_objects_stay_while_the_api_server_is_away(follower: Follower, unused_tcp_port: int) -> None:
    server = follower.server
    await follower.finds_one()
    await until(lambda: len(server.watching) == 4)
    server.refuses = 503
    server.cut()
    await until(lambda: len(follower.lines("discovery_failed")) == 4)
    assert follower.objects.awaited is False
    # Also entries of another set of pools, or of another server.
    follower.follow(POOL, "kubernetes+http://inferencepool/llama", api=f"http://127.0.0.1:{unused_tcp_port}")
    await follower.objects.answered.wait()
    assert (follower.says, follower.objects.awaited) == ({"batch": 1}, True)
    server.refuses = None
    server.put(OBJECTIVES, objective("more", 2, pool="llama"))
    follower.follow(POOL, "kubernetes+http://inferencepool/llama")
    await follower.until(batch=1, more=2)
    await until(lambda: follower.objects.awaited is False)


async def test_a_group_that_stays_away_does_not_hide_the_others(follower: Follower) -> None:
    follower.server.refused[OLD_REWRITES] = 500
    await follower.finds_one()
    follower.server.put(OBJECTIVES, objective("batch", 2))
    await follower.until(batch=2)
    assert follower.objects.awaited is True, "it may still bring names"


async def test_without_pools_nothing_is_asked_and_nothing_stays(follower: Follower) -> None:
    server = follower.server
    follower.follow("kubernetes+http://service/vllm")
    assert (follower.objects.answered.is_set(), follower.objects.awaited) == (True, False)
    await follower.finds_one()
    follower.follow(POOL, "http://b")
    asks = len(server.asked)
    follower.follow("kubernetes+http://service/vllm")
    await follower.until()
    await until(lambda: not server.watching)
    assert len(server.asked) == asks, "nor does a change of other backends begin anything anew"


async def test_unusable_objects_do_not_end_the_watch(follower: Follower) -> None:
    taken, refuses = follower.taken, [True]

    def take(entries: Entries) -> None:
        if refuses.pop():
            raise RuntimeError("a bug")
        taken.append(entries)

    follower.objects._take = take
    follower.server.put(OBJECTIVES, objective("batch", 1))
    follower.follow(POOL)
    await until(lambda: follower.lines("discovery_failed"))
    refuses.append(False)
    follower.server.put(OBJECTIVES, objective("batch", 2))
    await follower.until(batch=2)


async def test_namespaces_are_followed_each(follower: Follower) -> None:
    follower.follow(POOL, "kubernetes+http://serving/inferencepool/llama")
    await follower.objects.answered.wait()
    places = {query["path"].split("/")[5] for query in follower.server.asked}
    assert places == {"default", "serving"}
