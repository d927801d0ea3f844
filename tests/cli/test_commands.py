"""The command line: each flag and variable sets its key, and each mistake exits with 2 and a helpful message."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from llmproxy import __version__
from llmproxy.cli import commands as cli
from llmproxy.cli.flags import COMMON, FLAGS, SHOWN, Flag
from llmproxy.config import Config, hash_of, keys
from tests import ROOT

Serve = Callable[..., Config]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLMPROXY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations that `serve` would run. A fake `run` records them and exits with 3."""
    configs: list[Config] = []
    process = ModuleType("llmproxy.process")

    def run(config: Config, _: object) -> int:
        configs.append(config)
        return 3

    process.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llmproxy.process", process)
    return configs


@pytest.fixture
def serve(served: list[Config]) -> Serve:
    def run(*arguments: str) -> Config:
        result = CliRunner().invoke(cli.app, ["serve", *arguments])
        assert (result.exit_code, result.output) == (3, "")
        return served.pop()

    return run


def refused(arguments: Sequence[str]) -> str:
    """Run a command that must exit with 2, print nothing on standard output, and return its standard error."""
    result = CliRunner().invoke(cli.app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    return result.stderr


# --- serve ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["http://a", "http://b"],
        ["--backend", "http://a", "--backend", "http://b"],
        ["--backend", "http://a,http://b"],
        ["--backends", "http://a", "http://b"],
        ["--static-backends", "http://a, http://b,"],
        ["--worker-urls", "http://a", "http://b"],
        ["--worker-urls", "http://a http://b"],
        ["--port", "1", "--worker-urls", "http://a", "http://b", "--host", "::"],
    ],
)
def test_backends_are_given_by_each_known_flag(serve: Serve, arguments: list[str]) -> None:
    assert [backend.url for backend in serve(*arguments).backends] == ["http://a", "http://b"]


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.keys == ("backends",)], ids=lambda flag: flag.name)
def test_backends_are_given_by_variables(serve: Serve, monkeypatch: pytest.MonkeyPatch, flag: Flag) -> None:
    monkeypatch.setenv(flag.variable, "http://a,http://b http://c")
    assert [backend.url for backend in serve().backends] == ["http://a", "http://b", "http://c"]
    assert [backend.url for backend in serve(flag.name, "http://d", "http://e").backends] == ["http://d", "http://e"]


def test_a_role_precedes_the_url(serve: Serve) -> None:
    given = serve("--backend", "prefill=http://a,decode=http://b", "--backend", "http://c", "both=http://d")
    assert [(one.url, one.role) for one in given.backends] == [
        ("http://a", "prefill"),
        ("http://b", "decode"),
        ("http://c", "both"),
        ("http://d", "both"),
    ]


def test_a_wrong_role_is_named() -> None:
    said = refused(["serve", "--backend", "prefil=http://a"])
    assert "backends[0].role: 'prefil' is none of both, prefill, decode (nearest: \"prefill\")" in said


OTHER_THAN_DEFAULT = {
    "host": "::1",
    "usage.time_zone": "Europe/Berlin",
    "log_format": "json",
    "log_level": "debug",
    "reload": "signal",
    "drain_queued": "finish",
    "trust_headers": "all",
    "trust_proxy_headers": "true",
    "clients.trusted_proxies": "loopback",
    "admin.public_metrics": "true",
    "scheduling.fairness": "fcfs",
    "scheduling.placement": "session",
    "scheduling.flow": "header:x-tenant",
    "scheduling.session": "cookie:SID",
    "clients.allowed_origins": "https://app.example,http://localhost:3000",
    "scheduling.ordering": "fcfs",
    "scheduling.fairness_cost": "requests",
    "scheduling.preemption": "false",
    "scheduling.refuse_late": "true",
    "scheduling.kv_full_ratio": "0.5",
    "scheduling.kv_connector": "store",
    "retry.budget_ratio": "0.5",
    "retry.continue": "off",
    "health.ejected_ratio_max": "0.4",
    "body_bytes_total_max": "99999999",
    "queue.bytes_max": "99999999",
    "queue.band_bytes_max": "99999999",
    "queue.flow_bytes_max": "99999999",
    "discovery.kubernetes_api": "http://127.0.0.1:8001",
    "cluster.listen": "127.0.0.1:8090",
    "cluster.advertise": "10.0.0.7:8090",
    "cluster.lock": "valkey://127.0.0.1:6379",
    "cluster.plaintext": "true",
    "admin_key": hash_of("k"),
    "forward_credentials": "true",
    "decision_log_sample": "0.5",
    "tracing": "true",
    "scaling.pools": "llama,qwen",
    "scaling.utilisation": "0.5",
}


def value_of(config: Any, key: str) -> Any:
    return reduce(getitem, key.split("."), config)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.keys != ("backends",)], ids=lambda flag: flag.name)
def test_every_flag_and_its_variable_reach_their_keys(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, flag: Flag
) -> None:
    text = OTHER_THAN_DEFAULT.get(flag.keys[0], "7")
    by_flag = serve("http://a", flag.name, text)
    monkeypatch.setenv(flag.variable, text)
    given, default = by_flag.model_dump(), Config().model_dump()
    assert serve("http://a").model_dump() == given
    changed = {key for key in keys() if value_of(given, key) != value_of(default, key)}
    assert changed == {"backends", *flag.keys}


def test_a_selector_may_have_commas(serve: Serve) -> None:
    found = serve(
        "--backend", "kubernetes+http://pods/app=vllm,tier=a,llm-d.ai/role!=decode:8000,decode=http://b,http://c",
        "--backend", "prefill=kubernetes+http://pods/app=vllm,tier=b",
    ).backends  # fmt: skip
    assert [(one.role, one.url) for one in found] == [
        ("both", "kubernetes+http://pods/app=vllm,tier=a,llm-d.ai/role!=decode:8000"),
        ("decode", "http://b"),
        ("both", "http://c"),
        ("prefill", "kubernetes+http://pods/app=vllm,tier=b"),
    ]


def test_flags_override_variables_file_and_defaults(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("backends: [http://f]\nport: 1\nqueue: {max_wait_s: 1, requests_max: 1, bytes_max: 99999999}\n")
    monkeypatch.setenv("LLMPROXY_QUEUE_MAX_WAIT_S", "2")
    monkeypatch.setenv("LLMPROXY_QUEUE_SIZE", "2")
    config = serve("--config", str(file), "--queue-timeout-secs", "3")
    assert (config.queue.max_wait_s, config.queue.requests_max, config.queue.bytes_max, config.port) == (
        3,
        2,
        99999999,
        1,
    )
    assert config.queue.band_requests_max == 10_000
    monkeypatch.setenv("LLMPROXY_CONFIG", str(file))
    assert serve().backends[0].url == "http://f"


def test_unknown_variable_or_flag_is_refused(served: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(["serve", "http://a", "--weight=1"]) == (
        "--weight: only a file can hold tenants[].weight: write it into the file that --config names\n"
    )
    monkeypatch.setenv("LLMPROXY_BAKCENDS", "http://a")
    assert refused(["serve", "http://a"]) == (
        'LLMPROXY_BAKCENDS: is not a known variable (nearest known variable: "LLMPROXY_BACKENDS")\n'
    )
    assert not served


@pytest.mark.parametrize(
    ("word", "preset"),
    [
        ("roundrobin", "round_robin"),
        ("round-robin", "round_robin"),
        ("LEAST_REQUEST", "least_request"),
        ("session",) * 2,
    ],
)
def test_placements_have_the_names_of_other_routers_too(serve: Serve, word: str, preset: str) -> None:
    for flag in ("--routing-logic", "--policy", "--placement"):
        assert serve("http://a", flag, word).scheduling.placement == preset


OTHER_ROUTERS = re.findall(
    r"`(-[^`*]+)`(?=[^|]*\|$)", (ROOT / "docs" / "reference" / "other-routers.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("words", [words for words in OTHER_ROUTERS if " " in words])
def test_flags_on_the_page_of_other_routers_can_be_pasted(serve: Serve, tmp_path: Path, words: str) -> None:
    (tmp_path / "llmproxy.yaml").touch()
    with contextlib.chdir(tmp_path):
        assert "http://a" in [backend.url for backend in serve("http://a", *words.split()).backends]


def test_api_keys_are_divided_by_spaces_alone(serve: Serve) -> None:
    assert serve("http://a", "--api-key", "a,b c", "--api-key", "d").api_keys == ("a,b", "c", "d")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no backends: name at least one vLLM server, as in `llmproxy serve --backend http://gpu-0:8000`"),
        (["gpu-0:8000"], "URL: 'gpu-0:8000' should start with http:// or https://"),
        (["http://a", "--port", "x"], "--port: port: should be a valid integer, not 'x'"),
        (["http://a", "--host", ""], "--host: host: should have at least 1 character"),
        (["http://a", "--api-key", ""], "--api-key: api_keys[0]: should be printable ASCII characters without spaces"),
        (["http://a", "--backend", ""], "--backend, URL: '' should start with http://"),
        (
            ["http://a", "--policy", "cache_aware"],
            "--policy: scheduling.placement: 'cache_aware' is none of cost, ",
        ),
        (
            ["http://a", "--queue-size", "1", "--queue-requests-max", "1"],
            "--queue-size: queue.requests_max: is set by --queue-requests-max too; give only one of them",
        ),
        (["http://a", "--config", "/none.yaml"], "/none.yaml: cannot be read: No such file or directory"),
        (["http://a", "--prot", "1"], "No such option: --prot"),
    ],
)
def test_serve_refuses_in_words(served: list[Config], arguments: list[str], message: str) -> None:
    assert message in refused(["serve", *arguments])
    assert not served


def test_problem_names_the_variable(served: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPROXY_LOG_FORMAT", "xml")
    assert refused(["serve", "http://a"]).startswith("LLMPROXY_LOG_FORMAT: log_format: 'xml' is none of text, json")
    assert not served


def help_of(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) == 80
    assert "…" not in done.stdout
    assert "\x1b" not in done.stdout
    return done.stdout


def flags_in(text: str) -> list[str]:
    return re.findall(r"^│ (?:-c, )?(--[a-z0-9-]+) ", text, re.MULTILINE)


def panels_in(text: str) -> list[str]:
    return re.findall(r"^╭─ ([\w ]+) ─+╮$", text, re.MULTILINE)


def test_help_shows_the_common_flags_in_panels() -> None:
    text = help_of("serve", "--help")
    common = [flag for flags in COMMON.values() for flag in flags]
    assert panels_in(text) == ["Arguments", *COMMON, "Options"]
    assert flags_in(text) == [*common, "--config", "--help-all", "--help"]
    assert len(common) < 20


def test_help_all_shows_every_key_once() -> None:
    text = help_of("serve", "--help-all")
    assert SHOWN.keys() == keys().keys()
    assert sorted(flags_in(text)) == sorted([*SHOWN.values(), "--config", "--help-all", "--help"])
    assert len(set(panels_in(text))) == len(panels_in(text))
    assert "[65536]" in text


@pytest.mark.parametrize("command", ["check", "config", "hash-key", "replica", "demo", "simulate", ""])
def test_help_is_whole_at_80_columns(command: str) -> None:
    assert "│ --help " in help_of(*command.split(), "--help")


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(shell: str, tmp_path: Path) -> None:
    # Completion uses a variable, which the command reads only under its own name.
    def message(**environment: str) -> str:
        command = [sys.executable, "-m", "llmproxy", *([] if environment else ["--show-completion", shell])]
        shell_known = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
        asked = {**os.environ, **shell_known, **environment}
        return subprocess.run(command, env=asked, capture_output=True, text=True, check=True).stdout

    assert "_LLMPROXY_COMPLETE" in message()
    words = {
        "bash": {"COMP_WORDS": "llmproxy si", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "llmproxy si"},
        "fish": {"_TYPER_COMPLETE_ARGS": "llmproxy si", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    assert "simulate" in message(_LLMPROXY_COMPLETE=f"complete_{shell}", **words)


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "port: 81\nbackends: [{url: http://a, name: left, role: decode, max_in_flight: 4}, http://b]\n"
            "scheduling: {fairness: fcfs}\n",
            ["0.0.0.0:81", "left", "http://a, decode only, at most 4 in flight", "fairness fcfs", "100 % (critical),"],
        ),
        ("", ["0.0.0.0:8080, without API keys\n", "none here"]),
        ("api_keys: [k]", ["0.0.0.0:8080, with API keys\n"]),
        (f"tenants: [{{name: a, keys: [{hash_of('k')}]}}]", ["0.0.0.0:8080, with API keys\n"]),
        ("models: [{name: m}]", ["latency       no objectives\nentries       1 models, 0 objectives by header, 0 t"]),
        (
            "models:\n- {name: m, tpot_s: 0.05}\n- {name: chat, target: m, ttft_s: 1}\n"
            "- {name: fast, target: m, tpot_s: 0.02}\n"
            f"- {{name: late, target: other}}\nobjectives: [{{name: i, ttft_s: 0.5}}, {{name: night}}]\n"
            f"tenants: [{{name: a, keys: [{hash_of('k')}], tpot_s: 0.0125}}]\n",
            [
                "latency       m: 50 ms a token\n              chat: first token 1 s, 50 ms a token\n"
                "              fast: 20 ms a token\n              tenant a: 12.5 ms a token\n"
                "              header i: first token 0.5 s\nentries       4 models, 2 objectives by header, 1 tenants"
            ],
        ),
        ("discovery: {file: /etc/llmproxy/backends.yaml}", ["those in /etc/llmproxy/backends.yaml"]),
    ],
)
def test_check_prints_a_summary_of_a_correct_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    result = CliRunner().invoke(cli.app, ["check", str(file)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert [part for part in (f"{file}: fine", *parts) if part not in result.stdout] == []


def test_check_prints_all_problems_and_exits_with_2(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("prot: 1\nport: x\n")
    assert refused(["check", str(file)]).splitlines() == [
        f'{file}:1: prot: is not a known key (nearest known key: "port")',
        f"{file}:2: port: should be a valid integer, not 'x'",
    ]


# --- hash-key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["s3cret", "s3cret\n", "s3cret\r\n"])
def test_hash_key_prints_the_hash_of_a_key(line: str) -> None:
    result = CliRunner().invoke(cli.app, ["hash-key"], input=line)
    known = "sha256:1ec1c26b50d5d3c58d9583181af8076655fe00756bf7285940ba3670f99fcba0"
    assert (result.exit_code, result.stdout, result.stderr) == (0, known + "\n", "")


def test_hash_key_makes_a_different_key_each_time() -> None:
    printed = [CliRunner().invoke(cli.app, ["hash-key", "--new"]).stdout.splitlines() for _ in range(2)]
    assert printed[0] != printed[1]
    for key, message in printed:
        assert message == hash_of(key)
        assert len(key) > 40
        assert Config.model_validate({"api_keys": [key]}).api_keys == (key,)


@pytest.mark.parametrize("text", ["", "\n", "two words\n", "one\ntwo\n", "s3cret \n", "\u00e9\n", b"\xff", "x" * 4097])
def test_hash_key_refuses_an_impossible_key_without_repeating_it(text: str | bytes) -> None:
    result = CliRunner().invoke(cli.app, ["hash-key"], input=text)
    assert (result.exit_code, result.stdout) == (2, "")
    message = "llmproxy hash-key: the key should be one line of printable ASCII characters without spaces"
    assert result.stderr.startswith(message)
    assert result.stderr.strip() == message


def test_hash_key_does_not_echo_typed_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(cli, "getpass", lambda prompt: f"typed-at-{prompt.strip(': ')}")
    cli.hash_key()
    assert capsys.readouterr().out == hash_of("typed-at-key") + "\n"


def test_hash_key_takes_no_key_as_an_argument() -> None:
    assert "unexpected extra argument" in refused(["hash-key", "s3cret"])


# --- replica ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "none"], "llmproxy replica: there is no engine profile 'none'; known: llama-"),
        (["--model", "a", "--adapter", "a"], "llmproxy replica: the model and its adapters need different names"),
        (["--kv-tokens", "1024", "--max-model-len", "2048"], "llmproxy replica: max_model_len 2048 does not fit"),
        (["--kv-transfer", "store"], "llmproxy replica: kv_transfer store needs a kv_store, and nothing else uses one"),
        (["--shutdown", "later"], "'later' is not one of 'now', 'abort', 'hang'"),
    ],
)
def test_replica_refuses_in_words(arguments: list[str], message: str) -> None:
    assert message in refused(["replica", "--port", "0", *arguments])


def test_replica_reports_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli.app, ["replica", "--port", str(port)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"llmproxy replica: cannot listen on 127.0.0.1:{port}: ")


# --- the command itself -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_module_is_the_command() -> None:
    message = subprocess.run(
        [sys.executable, "-m", "llmproxy", "--version"], capture_output=True, text=True, check=True
    )
    assert (message.stdout, message.stderr) == (f"llmproxy {__version__}\n", "")


def test_demo_starts_nothing_when_its_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.create_subprocess_exec", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli.app, ["demo", "--port", str(port)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"llmproxy demo: port {port} cannot be used (address already in use); try another one with --port" in (
        result.stderr
    )


def test_a_batch_does_not_write_into_its_own_requests(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("{}")
    result = CliRunner().invoke(cli.app, ["batch", str(file), "--out", str(file)])
    assert (result.exit_code, file.read_text()) == (2, "{}")
    assert "has the requests; name another file with --out" in result.output
