"""The text about the state of the proxy, the worst first."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from llmproxy.core.domain import BackendPace, Outcome, Verdict, WaitReason
from llmproxy.core.snapshot import BackendStatus, BandSnapshot, FlowSnapshot, HeadSnapshot, PoolSnapshot
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.live.minute import Minute, Sums
from llmproxy.observe.live.summary import summary_of
from llmproxy.scheduling.attempt import Attempt
from tests.observe.live.test_minute import ended

NAMES = {100: "critical", 0: "default", -100: "sheddable"}


def status(name: str, state: str = "up") -> BackendStatus:
    return BackendStatus(name, f"http://{name}:8000", "both", "config", state, 0, 0.0)


def band(level: int, waiting: int = 0, oldest_s: float = 0.0, **fields: Any) -> BandSnapshot:
    head = HeadSnapshot("1", "r", oldest_s, 10.0, 5, None, 1.0)
    shown = (FlowSnapshot("f", waiting, oldest_s, head, ()),) if waiting else ()
    fields.setdefault("reason", WaitReason.FULL if waiting else None)
    return BandSnapshot(
        level, 1.0, 0.0, waiting, fields.pop("blocked", MappingProxyType({})), len(shown), shown, **fields
    )


def pool(*bands: BandSnapshot, backends: int = 3, down: int = 0) -> PoolSnapshot:
    shown: Any = [SimpleNamespace(view=SimpleNamespace(available=at < backends)) for at in range(backends + down)]
    return PoolSnapshot("llama", True, False, 0, 0, bands, tuple(shown))


PAID = BackendStatus("paid", "https://x", "external", "config", "up", 0, 0.0)
UP = [status("gpu-0"), status("gpu-1"), status("gpu-2")]


@pytest.mark.parametrize(
    ("pools", "statuses", "reasons", "wanted"),
    [
        ([pool()], UP, {}, ("ok", "Healthy: 3 of 3 replicas up, nothing waits.")),
        ([pool()], UP[:1], {}, ("ok", "Healthy: 1 of 1 replica up, nothing waits.")),
        ([], [], {}, ("bad", "No backend is known.")),
        ([pool()], [*UP, PAID], {}, ("ok", "Healthy: 3 of 3 replicas up, nothing waits.")),
        ([pool()], [status("gpu-0", "down"), PAID], {}, ("bad", "No backend is up. gpu-0 is down.")),
        (
            [pool(band(0, 12, 2.14), band(-100, 1))],
            UP,
            {},
            ("warning", "llama: 12 default, 1 sheddable requests wait, up to 2.1 s: all 3 replicas are full."),
        ),
        (
            [pool(band(0, 1, 0.4), backends=2, down=1)],
            [*UP[:2], status("gpu-2", "down")],
            {},
            (
                "warning",
                "gpu-2 is down. llama: 1 default request waits, up to 0.4 s: "
                "all 2 replicas that take requests are full.",
            ),
        ),
        (
            [pool(band(0, 1, 0.4), backends=1)],
            UP[:1],
            {},
            ("warning", "llama: 1 default request waits, up to 0.4 s: its replica is full."),
        ),
        (
            [pool(band(0, 1, 0.4), backends=1, down=1)],
            [UP[0], status("gpu-1", "down")],
            {"gpu-1": "refused"},
            (
                "warning",
                "gpu-1 is down: refused. llama: 1 default request waits, up to 0.4 s: "
                "the only replica that takes requests is full.",
            ),
        ),
        (
            [pool(band(-100, 2, reason=WaitReason.CEILING))],
            UP,
            {},
            ("warning", "llama: 2 sheddable requests wait, up to 0.0 s: the room left is kept for higher bands."),
        ),
        ([pool()], [*UP, status("gpu-3", "ejected")], {"gpu-3": "hung"}, ("warning", "gpu-3 is ejected: hung.")),
        (
            [pool()],
            [*UP, *(status(f"x-{i}", "down") for i in range(5))],
            {"x-0": "refused"},
            ("warning", "x-0, x-1, x-2 and 2 more are down."),
        ),
        (
            [pool()],
            [status("gpu-0", "down")],
            {"gpu-0": "refused"},
            ("bad", "No backend is up. gpu-0 is down: refused."),
        ),
        (
            [pool()],
            [*UP, status("gpu-3", "drained")],
            {},
            ("ok", "Healthy: 3 of 4 replicas up, nothing waits. gpu-3 is drained."),
        ),
        (
            [pool()],
            [*UP, status("gpu-3", "starting"), status("gpu-4", "starting")],
            {},
            ("ok", "Healthy: 3 of 5 replicas up, nothing waits. gpu-3, gpu-4 are starting."),
        ),
        (
            [pool(band(0, blocked=MappingProxyType({"tenant acme": 4})))],
            UP,
            {},
            ("ok", "Healthy: 3 of 3 replicas up, nothing else waits. 4 requests wait for the limit tenant acme."),
        ),
    ],
)
def test_the_sentence(
    pools: list[PoolSnapshot], statuses: list[BackendStatus], reasons: dict[str, str], wanted: tuple[str, str]
) -> None:
    assert summary_of(pools, statuses, reasons, NAMES, 0) == wanted


def test_requests_for_a_model_that_nobody_serves_yet_are_said() -> None:
    assert summary_of([pool()], UP, {}, NAMES, 2) == (
        "warning",
        "2 requests wait for a model that no backend serves yet.",
    )


@pytest.mark.parametrize(
    ("pace", "prompts", "said"),
    [
        (1.94, 1.0, " gpu-2 (1.9x) is slower than the pool."),
        (1.0, 3.0, " gpu-2 (prompts 3.0x) is slower than the pool."),
        (8.0, 3.0, " gpu-2 (8.0x) is slower than the pool."),
        (1.4, 1.4, ""),
    ],
)
def test_a_slow_replica_is_named_and_is_healthy(pace: float, prompts: float, said: str) -> None:
    learned = [BackendPace("gpu-2", prompts, 1.0, 0.5, 1, 0, 0)]
    sentence = f"Healthy: 3 of 3 replicas up, nothing waits.{said}"
    seen = replace(pool(), paces={"gpu-1": 1.0, "gpu-2": pace})
    assert summary_of([seen], UP, {}, NAMES, 0, learned) == ("ok", sentence)


def test_outdated_pace_is_not_shown() -> None:
    """The placement learns from the last fifty answers, and both of its factors from answers in one piece."""
    learned = [BackendPace("gpu-2", 3.7, 3.7, 0.5, 1, 0, 0)]
    seen = replace(pool(), paces={"gpu-1": 1.0, "gpu-2": 1.0})
    assert summary_of([seen], UP, {}, NAMES, 0, learned)[1] == "Healthy: 3 of 3 replicas up, nothing waits."


def test_the_pace_of_an_ejected_replica_is_said_once() -> None:
    learned = [BackendPace("gpu-2", 2.4, 1.0, 0.5, 1, 0, 0)]
    seen, statuses = replace(pool(), paces={"gpu-2": 2.4}), [*UP[:2], status("gpu-2", "ejected")]
    why = {"gpu-2": "slow: 8.0 times as slow as usual"}
    said = "gpu-2 is ejected: slow: 8.0 times as slow as usual."
    assert summary_of([seen], statuses, why, NAMES, 0, learned) == ("warning", said)


@pytest.mark.parametrize(
    ("paces", "unknown"),
    [({"gpu-1": None}, "gpu-1"), ({"gpu-1": None, "gpu-0": None, "gpu-2": 1.0}, "gpu-0, gpu-1")],
)
def test_replicas_at_work_whose_pace_is_not_known_yet_are_not_called_healthy(
    paces: dict[str, float | None], unknown: str
) -> None:
    said = f"Learning: 3 of 3 replicas up, nothing waits. The pace of {unknown} is not known yet."
    assert summary_of([replace(pool(), paces=paces)], UP, {}, NAMES, 0) == ("ok", said)


def test_requests_wait_for_a_full_name_while_another_replica_is_slow() -> None:
    waiting = pool(band(0, 2, 1.5, reason=WaitReason.NO_MATCH))
    seen = replace(waiting, paces={"gpu-0": 1.0, "gpu-1": 1.0, "gpu-2": 4.0})
    assert summary_of([seen], UP, {}, NAMES, 0) == (
        "warning",
        "llama: 2 default requests wait, up to 1.5 s: no backend with room suits them yet."
        " gpu-2 (4.0x) is slower than the pool.",
    )


def test_a_member_without_a_leader_is_not_healthy() -> None:
    level, text = summary_of([pool()], UP, {}, NAMES, 0, led=False)
    assert (level, text.partition(":")[0]) == ("bad", "This member of the cluster has no leader")


def minute(*exits: RequestExit) -> Sums:
    kept = Minute()
    for one in exits:
        kept.record(one)
    kept.roll(1)
    return kept.total


def failed(backend: str, outcome: Outcome = Outcome.COMPLETED) -> RequestExit:
    """A request whose first attempt failed there, and whose second one was served elsewhere."""
    one = ended(backend="gpu-0", outcome=outcome, status=502)
    one.tried.insert(0, Attempt(backend=backend, verdict=Verdict.FAILED))
    return one


@pytest.mark.parametrize(
    ("exits", "wanted"),
    [
        (
            [ended(backend=None, outcome=Outcome.REJECTED_CAPACITY, status=429), ended()],
            ("warning", "1 of 2 requests were refused in the last minute (rejected_capacity)."),
        ),
        (
            [ended(backend=None, outcome=Outcome.EXPIRED, status=429)] * 2
            + [ended(backend=None, outcome=Outcome.REJECTED_CAPACITY, status=429)],
            ("warning", "3 of 3 requests were refused in the last minute (expired, ...)."),
        ),
        (
            [ended(backend=None, outcome=Outcome.RATE_LIMITED, status=429), ended()],
            (
                "ok",
                "Healthy: 3 of 3 replicas up, nothing waits. "
                "1 of 2 requests were refused in the last minute (rate_limited).",
            ),
        ),
        (
            [ended(outcome=Outcome.UPSTREAM_STATUS, status=500), ended()],
            ("warning", "1 of 2 requests failed in the last minute (upstream_status)."),
        ),
        (
            [failed("gpu-1")] * 3 + [ended(backend="gpu-1")] * 6,
            ("warning", "gpu-1 failed 3 of 9 attempts in the last minute."),
        ),
        ([failed("gpu-1")] * 2 + [ended()], ("ok", "Healthy: 3 of 3 replicas up, nothing waits.")),
        ([ended(outcome=Outcome.UPSTREAM_STATUS, status=404)], ("ok", "Healthy: 3 of 3 replicas up, nothing waits.")),
    ],
)
def test_recent_refusals_and_failures_are_not_healthy(exits: list[RequestExit], wanted: tuple[str, str]) -> None:
    assert summary_of([pool()], UP, {}, NAMES, 0, minute=minute(*exits)) == wanted
