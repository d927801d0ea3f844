"""`llmproxy doctor` and `llmproxy init` from their command line to the file that they write."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer
from typer.testing import CliRunner, Result

from llmproxy.cli import first_hour
from llmproxy.cli.commands import app
from llmproxy.config import load
from llmproxy.tools.doctor.init import OPEN
from llmproxy.tools.doctor.presets import PRESETS
from tests.tools.doctor.servers import card, engine, llama_cpp


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    found = engine(card(), card("sql", parent="m"), key="secret")
    async with found:
        yield found


def url_of(server: BaseTestServer) -> str:
    return f"http://127.0.0.1:{server.port}"


async def run(*arguments: str, **environment: str) -> Result:
    """Runs a command in a thread, because a command has an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)


async def test_doctor_exits_with_1_if_a_server_is_unusable(server: TestServer, unused_tcp_port: int) -> None:
    done = await run("doctor", url_of(server), "--api-key", "secret")
    assert (done.exit_code, "vLLM 0.32.0" in done.output) == (0, True), done.output
    dead = f"http://127.0.0.1:{unused_tcp_port}"
    done = await run("doctor", url_of(server), dead, LLMPROXY_BACKEND_API_KEY="secret")
    assert (done.exit_code, f"{dead}  not usable" in done.output) == (1, True)
    done = await run("doctor", "gpu-0:8000")
    assert (done.exit_code, "should start with http://" in done.stderr) == (2, True)


async def test_doctor_looks_at_the_backends_of_a_file(server: TestServer, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text(f"backends: ['{url_of(server)}/v1']\n")
    file = tmp_path / "c.yaml"
    file.write_text(f"backends: ['dns+http://vllm:8000']\nbackend_api_key: secret\ndiscovery: {{file: {more}}}\n")
    done = await run("doctor", str(file))
    assert done.exit_code == 0, done.output
    assert f"{url_of(server)}  vLLM" in done.stdout
    assert "dns+http://vllm:8000  not looked at" in done.stdout
    file.write_text("port: 1\n")
    done = await run("doctor", str(file))
    assert (done.exit_code, done.stderr) == (2, f"{file}: has no backends\n")


@pytest.mark.parametrize("preset", [None, *PRESETS])
async def test_init_writes_what_serve_reads(
    server: TestServer, tmp_path: Path, unused_tcp_port: int, preset: str | None
) -> None:
    out, dead = tmp_path / "out.yaml", f"http://127.0.0.1:{unused_tcp_port}"
    chosen = ["--preset", preset] if preset else []
    done = await run("init", url_of(server), dead, "--out", str(out), "--api-key", "secret", *chosen)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert f"{out}: written; backends: 2, not usable now: 1" in done.stdout
    assert done.stdout.endswith(f"{OPEN}\nNext: LLMPROXY_BACKEND_API_KEY=... llmproxy serve --config {out}\n")
    text = out.read_text()
    assert "asks clients for no key until you set api_keys or tenants" in text
    assert "secret" not in text
    assert f"  - {url_of(server)}  # vLLM 0.32.0: m\n" in text
    assert f"  - {dead}\n    # Connection refused." in text
    config = load(out)
    assert [backend.url for backend in config.backends] == [url_of(server), dead]
    if preset is None:
        assert config == load(None).model_copy(update={"backends": config.backends})
    if preset == "chat":
        assert [(model.name, model.ttft_s, model.tpot_s) for model in config.models] == [
            ("m", 1.0, 0.04),
            ("sql", 1.0, 0.04),
        ]


async def test_a_preset_that_needs_models_says_that_none_is_known(tmp_path: Path, unused_tcp_port: int) -> None:
    out = tmp_path / "out.yaml"
    done = await run("init", f"http://127.0.0.1:{unused_tcp_port}", "--out", str(out), "--preset", "chat")
    assert done.exit_code == 1
    assert done.stdout.endswith(
        f"\nNo server is usable now. Follow the advice above, and look again: llmproxy doctor {out}\n"
        "If you repeat `llmproxy init`, add --force.\n"
    )
    assert "# No server told its models." in out.read_text()


async def test_init_from_another_router(server: TestServer, tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    command = (
        f"vllm-router --worker-urls {url_of(server)} --policy consistent_hash --port 9000 --queue-size 7"
        " --static-aliases gpt-4:m --dp-aware"
    )
    done = await run("init", "--from", command, "--out", str(out), "--preset", "batch", "--api-key", "secret")
    assert done.exit_code == 0, done.output
    config = load(out)
    assert (config.port, config.queue.requests_max, config.scheduling.placement) == (9000, 7, "session")
    assert config.queue.max_wait_s == 86_400
    assert config.models[0].target == "m"
    assert out.read_text().endswith("# Not carried over from vllm-router:\n# - --dp-aware\n")
    assert "Not carried over from vllm-router: 1, listed at its end" in done.stdout


async def test_init_sends_the_key_to_no_server_of_others(server: TestServer, tmp_path: Path) -> None:
    """The key is for engines that want one, and a file of nginx has other servers too."""
    got: list[tuple[str, str | None]] = []

    def other(name: str, status: int, body: str = "") -> TestServer:
        async def answer(request: web.Request) -> web.Response:
            got.append((name, request.headers.get("Authorization")))
            return web.Response(text=body, status=status, content_type="application/json")

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        return TestServer(app)

    paid = '{"object": "list", "data": [{"id": "gpt", "object": "model", "owned_by": "openai"}]}'
    file, out = tmp_path / "nginx.conf", tmp_path / "out.yaml"
    page, api, loading = other("page", 404), other("paid", 200, paid), other("loading", 503)
    async with page, api, loading:
        servers = " ".join(f"server 127.0.0.1:{one.port};" for one in (server, page, api, loading))
        file.write_text(f"upstream all {{ {servers} }}\n")
        done = await run("init", "--from", str(file), "--out", str(out), LLMPROXY_BACKEND_API_KEY="secret")
        assert done.exit_code == 1, done.output
        assert [one.url for one in load(out).backends] == [url_of(loading)]
        text = " ".join(out.read_text().replace("\n#", "").split())
        assert f"{url_of(server)}: it wants an API key (/v1/models answers 401); repeat init with --api-key" in text
        done = await run("init", "--from", str(file), "--out", str(out), "--force", "--api-key", "secret")
        assert done.exit_code == 0, done.output
        assert [one.url for one in load(out).backends] == [url_of(server), url_of(loading)]
        assert "written; backends: 2, not usable now: 1" in done.stdout
        left = out.read_text().partition("# Not carried over from nginx:")[2]
        assert f"# - {url_of(page)}: /v1/models answers 404" in left
        assert f"# - {url_of(api)}: it lists models, but not like vLLM" in left
        assert {name for name, _ in got} == {"page", "paid", "loading"}
        assert {key for _, key in got} == {None}
        # A person who names a server vouches for it.
        done = await run("init", url_of(api), "--from", str(file), "--out", str(out), "--force", "--api-key", "secret")
        assert [one.url for one in load(out).backends] == [url_of(api), url_of(server), url_of(loading)]
        assert ("paid", "Bearer secret") in got
        file.write_text(f"upstream page {{ server 127.0.0.1:{page.port}; }}\n")
        done = await run("init", "--from", str(file), "--out", str(out), "--force")
        assert (done.exit_code, "no server of nginx answers like an engine" in done.stderr) == (2, True)


async def test_init_writes_the_slots_of_llama_cpp(tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    async with llama_cpp(4) as server:
        done = await run("init", url_of(server), "--out", str(out))
        assert done.exit_code == 0, done.output
    assert load(out).backends[0].max_in_flight == 4
    assert "--config" in done.stdout
    assert OPEN not in done.stdout


@pytest.mark.parametrize("given", [[], ["--api-key", "wrong"]])
async def test_a_server_that_wants_a_key_is_advice_for_serve(
    server: TestServer, tmp_path: Path, given: list[str]
) -> None:
    out = tmp_path / "out.yaml"
    done = await run("init", url_of(server), "--out", str(out), *given)
    assert done.exit_code == 1
    assert f"look again: LLMPROXY_BACKEND_API_KEY=... llmproxy doctor {out}\n" in done.stdout
    assert "add --force" in done.stdout
    assert "--api-key" not in out.read_text()


@pytest.mark.parametrize(
    ("text", "next_key"),
    [
        ("servingEngineSpec: {vllmApiKey: s3cret}\n", True),
        ("routerSpec: {vllmApiKey: {secretName: s3cret}}\n", True),
        (
            "model_list: [{model_name: m, litellm_params: {model: vllm/m, api_base: 'dns+http://a:1', api_key: k}}]\n",
            True,
        ),
        (
            "model_list: [{model_name: m, litellm_params: {model: vllm/m, api_base: 'dns+http://a:1'}}]\n"
            "general_settings: {master_key: s3cret}\n",
            False,
        ),
        ("smg --worker-urls dns+http://a:1 --api-key s3cret\n", False),
    ],
)
async def test_a_fleet_with_keys_does_not_become_open_in_silence(tmp_path: Path, text: str, next_key: bool) -> None:
    out, file = tmp_path / "out.yaml", tmp_path / "router"
    file.write_text(text)
    done = await run("init", "--from", str(file), "--out", str(out))
    assert done.exit_code == 0, done.output
    key = "LLMPROXY_BACKEND_API_KEY=... " if next_key else ""
    assert done.stdout.endswith(f"{OPEN}\nNext: {key}llmproxy serve --config {out}\n")
    assert "s3cret" not in out.read_text()


async def test_init_from_pods_needs_no_cluster(tmp_path: Path) -> None:
    out, values = tmp_path / "out.yaml", tmp_path / "values.yaml"
    values.write_text("servingEngineSpec: {modelSpec: [{name: m}]}\n")
    done = await run("init", "--from", str(values), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "not looked at: the proxy finds these servers while it runs" in done.stdout
    assert load(out).backends[0].url == "kubernetes+http://pods/environment=test,release=test:8000"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "llmproxy init: name at least one server"),
        (["http://a", "--preset", "chats"], "llmproxy init: chats is none of chat, batch, rollout, agents"),
        (["gpu-0:8000"], "URL: 'gpu-0:8000' should start with http://"),
        (["--from", "/none.yaml"], "llmproxy init: /none.yaml cannot be read: No such file or directory"),
        (["--from", "vllm-router --policy random"], "llmproxy init: --from names no servers"),
    ],
)
def test_init_refuses_in_words(tmp_path: Path, arguments: list[str], message: str) -> None:
    out = tmp_path / "out.yaml"
    done = CliRunner().invoke(app, ["init", *arguments, "--out", str(out)])
    assert (done.exit_code, done.stderr[: len(message)], out.exists()) == (2, message, False)


async def test_init_replaces_a_file_only_by_force(tmp_path: Path, unused_tcp_port: int) -> None:
    out = tmp_path / "out.yaml"
    out.write_text("mine")
    arguments = "init", f"http://127.0.0.1:{unused_tcp_port}", "--out", str(out)
    done = await run(*arguments)
    assert (done.exit_code, "--force" in done.stderr, out.read_text()) == (2, True, "mine")
    assert (await run(*arguments, "--force")).exit_code == 1
    assert out.read_text() != "mine"
    done = await run("init", "dns+http://vllm:8000", "--out", str(tmp_path / "none" / "out.yaml"))
    assert (done.exit_code, "cannot write" in done.stderr) == (2, True)


def test_init_asks_for_servers_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(typer, "prompt", lambda _: "dns+http://vllm:8000  srv+http://vllm")
    out = tmp_path / "out.yaml"
    first_hour.init(out=out)
    assert [backend.url for backend in load(out).backends] == ["dns+http://vllm:8000", "srv+http://vllm"]
