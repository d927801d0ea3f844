"""A file combined with objects of a cluster: the result, the log lines, and the state after a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.config import Config, ConfigError, Entries, ModelConfig, ObjectiveConfig
from llmproxy.config.reload import Combined

BATCH = ("object batch", ObjectiveConfig(name="batch", criticality=-10))
CHAT = ("object chat", ModelConfig(name="chat", target="base"))


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as found:
        yield found


class Applied:
    """Records applied configurations. While `refuses` is set, raises ConfigError instead."""

    def __init__(self, **given: Any) -> None:
        self.configs: list[Config] = []
        self.refuses = False
        self.combined = Combined(Config.model_validate(given), self)

    def __call__(self, config: Config) -> None:
        if self.refuses:
            raise ConfigError(["no such file"])
        self.configs.append(config)


def test_each_change_of_the_cluster_is_logged(lines: list[Any]) -> None:
    applied = Applied()
    applied.combined.take_entries(Entries((BATCH,), (CHAT,)))
    assert [line.get("change", line["event"]) for line in lines] == [
        "bands.batch: added -10",
        "models[chat]: added {name: chat, target: base, limits: {}}",
        "objectives[batch]: added {name: batch, criticality: -10}",
        "reloaded",
    ]
    assert lines[-1] == {"event": "reloaded", "log_level": "info", "cause": "cluster", "changes": 3, "needs_restart": 0}
    lines.clear()
    applied.combined.take_entries(Entries((BATCH,), (CHAT,), frozenset({("object x", "is wrong")})))
    assert lines == [{"event": "object_refused", "log_level": "warning", "object": "object x", "why": "is wrong"}]


def test_a_problem_is_logged_once_and_again_after_it_was_solved(lines: list[Any]) -> None:
    applied = Applied(objectives=[{"name": "batch"}])
    for entries in (Entries((BATCH,)), Entries((BATCH,), (CHAT,)), Entries(), Entries((BATCH,))):
        applied.combined.take_entries(entries)
    refused = [line for line in lines if line["event"] == "object_refused"]
    assert [line["object"] for line in refused] == ["object batch"] * 2
    # A reload with the same objects logs nothing again.
    applied.combined.take(Config.model_validate({"objectives": [{"name": "batch", "ttft_s": 1}]}))
    assert lines.count(refused[0]) == 2


def test_a_refused_change_has_no_effect_until_it_is_accepted(lines: list[Any]) -> None:
    applied = Applied()
    applied.combined.take_entries(Entries((BATCH,)))
    lines.clear()
    applied.refuses = True
    applied.combined.take_entries(Entries((), (CHAT,)))
    assert lines == [{"event": "reload_failed", "log_level": "error", "cause": "cluster", "problem": "no such file"}]
    with pytest.raises(ConfigError):
        applied.combined.take(Config.model_validate({"port": 1}))
    applied.refuses = False
    applied.combined.take_entries(Entries((), (CHAT,)))
    assert applied.configs[-1].port == Config().port, "what was refused is not brought in by another change"
    applied.combined.take(Config.model_validate({"port": 2}))
    last = applied.configs[-1]
    assert (last.port, last.objectives, last.models) == (2, (), (CHAT[1],))
    applied.combined.take_entries(Entries())
    assert applied.configs[-1].port == 2
