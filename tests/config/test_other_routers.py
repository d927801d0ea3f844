"""Flags and policies of other routers are accepted, or refused with a replacement to paste."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from llmproxy.cli import commands as cli
from llmproxy.cli.flags import ALIASES, FLAGS, PREFIX, from_environment
from llmproxy.config import PLACEMENT_PRESETS, ConfigError, load
from llmproxy.config.other_routers import replacement_for, table

STARTED = 3
ROWS = list(dict.fromkeys(instead for _, _, instead in table().flags))
PASTED = [
    "--port 8001 --service-discovery static --static-backends http://a:8000,http://b:8000 --static-models m,m"
    " --static-model-types chat,chat --static-aliases gpt4:m --static-backend-health-checks --engine-stats-interval 10"
    " --request-stats-window 10 --log-stats --routing-logic session --session-key x-user-id",
    "--service-discovery k8s --k8s-namespace default --k8s-label-selector app=vllm --k8s-port 8000"
    " --routing-logic kvaware --lmcache-controller-port 9000 --dynamic-config-yaml d.yaml --log-level info",
    "--worker-urls http://a:8000 http://b:8000 --policy cache_aware --cache-threshold 0.5 --balance-abs-threshold 32"
    " --balance-rel-threshold 1.5 --eviction-interval-secs 120 --max-tree-size 67108864 --host 0.0.0.0 --port 30000"
    " --prometheus-port 29000 --prometheus-host 0.0.0.0 --log-level info",
    "--worker-urls http://a:8000 --intra-node-data-parallel-size 1 --disable-retries --disable-circuit-breaker"
    " --worker-startup-timeout-secs 120 --worker-startup-check-interval 1 --request-timeout-secs 1800"
    " --max-concurrent-requests 256 --queue-size 100 --queue-timeout-secs 60 --max-payload-size 536870912",
    "--pd-disaggregation --prefill http://a:8000 --decode http://b:8000 --prefill-policy cache_aware"
    " --retry-max-retries 3 --retry-initial-backoff-ms 50 --cb-failure-threshold 5 --cb-success-threshold 2"
    " --cb-timeout-duration-secs 60 --cb-window-duration-secs 120 --health-check-interval-secs 60"
    " --health-check-endpoint /health --health-failure-threshold 3 --health-success-threshold 2"
    " --request-id-headers x-id --model-path m --tokenizer-path m --log-dir /tmp --api-key k",
    "--http-port 8000 --router-mode kv --router-temperature 0.5 --router-kv-overlap-score-weight 1"
    " --router-queue-threshold 4 --router-queue-policy wspt",
    "--pool-name vllm --pool-namespace default --grpc-port 9002 --grpc-health-port 9003 --config-file c.yaml"
    " --metrics-port 9090 --refresh-metrics-interval 50ms --metrics-staleness-threshold 2s",
    "--config c.yaml --port 4000 --num_workers 4 --detailed_debug --request_timeout 600 --ssl_keyfile_path k.pem"
    " --ssl_certfile_path c.pem",
]
"""Arguments as the documents of other routers have them."""


@pytest.fixture(autouse=True)
def _stopped_before_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = ModuleType("llmproxy.process")
    process.run = lambda *_: STARTED  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llmproxy.process", process)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    # Files that the advice names.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llmproxy.yaml").touch()


def serve(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    return result.exit_code, result.stderr


@pytest.mark.parametrize("instead", ROWS)
def test_advice_can_be_pasted(tmp_path: Path, instead: str) -> None:
    for words in re.findall("`([^`]+)`", instead):
        if words.startswith("--"):
            more = () if "--backend" in words else ("http://a",)
            assert serve(*shlex.split(words), *more) == (STARTED, ""), words
        else:
            file = tmp_path / "pasted.yaml"
            file.write_text(words)
            assert load(file) != load()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("pattern", [pattern for pattern, _, _ in table().flags])
def test_every_row_is_reached_by_flag_and_by_variable(pattern: str) -> None:
    flag = pattern.replace("*", "some")
    message = replacement_for(flag)
    assert serve("http://a", flag, "value") == (2, f"{flag}: {message}\n")
    assert serve("http://a", f"{flag}=value") == (2, f"{flag}: {message}\n")
    if "_" not in flag:
        variable = PREFIX + flag.strip("-").replace("-", "_").upper()
        with pytest.raises(ConfigError) as caught:
            from_environment({variable: "value"})
        assert caught.value.problems == (f"{variable}: {message}",)


def test_no_row_matches_a_flag_of_serve() -> None:
    assert [flag.name for flag in FLAGS if replacement_for(flag.name)] == []


@pytest.mark.parametrize("line", PASTED)
def test_pasted_command_is_refused_with_all_unknown_flags(line: str) -> None:
    code, message = serve(*shlex.split(line))
    flags = {word for word in line.split() if word.startswith("--")}
    understood = {flag.name for flag in FLAGS} | {"--config"}
    assert code == 2
    assert {text.partition(":")[0] for text in message.splitlines()} == flags - understood
    assert flags & understood <= {*ALIASES, "--host", "--port", "--log-level", "--config"}


@pytest.mark.parametrize(("word", "preset"), table().placements.items())
def test_policy_of_another_router_is_refused_with_the_nearest(word: str, preset: str) -> None:
    assert preset in PLACEMENT_PRESETS
    assert word not in PLACEMENT_PRESETS
    code, message = serve("http://a", "--policy", word.replace("_", "-"))
    assert code == 2
    assert message.endswith(f'(nearest: "{preset}")\n')
    assert serve("http://a", "--policy", preset) == (STARTED, "")


def test_word_after_two_dashes_is_no_flag() -> None:
    code, message = serve("--", "--static-models")
    assert code == 2
    assert "backends[0].url: '--static-models' should start with http://" in message
