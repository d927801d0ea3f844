"""The commands against a server: what they print, what they say of errors, and how they leave the terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

HERE = Path(__file__).parent
KEY = "secret"


@pytest.fixture
async def proxy() -> AsyncIterator[TestServer]:
    """Answers as an llmproxy would a client with the admin key."""

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            nothing = {"error": {"message": f"There is nothing at {request.path}."}}
            return web.json_response(nothing, status=404, headers={"Server": "llmproxy"})
        name = "live.json" if request.path == "/debug/live" else "story.json"
        return web.Response(body=(HERE / name).read_bytes(), content_type="application/json")

    app = web.Application()
    app.router.add_get("/debug/{name}", answer)
    server = TestServer(app)
    async with server:
        yield server


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMPROXY_")}
    return kept | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"} | more


async def printed(*arguments: str, key: str = KEY) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "llmproxy",
        *arguments,
        stdout=-1,
        stderr=-1,
        env=environment(LLMPROXY_ADMIN_KEY_PLAIN=key),
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_one_picture_and_the_document(proxy: TestServer) -> None:
    url = f"127.0.0.1:{proxy.port}"
    code, out, _ = await printed("top", url, "--once")
    assert (code, max(map(len, out.splitlines()))) == (0, 80)
    assert "sheddable" in out
    assert "\x1b" not in out
    code, out, _ = await printed("top", url, "--json")
    assert (code, json.loads(out)) == (0, json.loads((HERE / "live.json").read_text()))
    code, out, _ = await printed("explain", "f7bb", url)
    assert (code, "completed (200) after 0.225 s" in out) == (0, True)


async def test_errors_are_for_people(proxy: TestServer, unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{proxy.port}"
    refused = await printed("top", url, "--once", key="")
    assert refused[0] == 1
    assert "--admin-key" in refused[2]
    assert "refuses this admin key" in (await printed("top", url, "--once", key="wrong"))[2]
    assert "not reachable: " in (await printed("explain", "a", f"127.0.0.1:{unused_tcp_port}"))[2]


async def test_another_server_is_told(unused_tcp_port: int) -> None:
    async with TestServer(web.Application(), port=unused_tcp_port):
        code, _, err = await printed("top", f"127.0.0.1:{unused_tcp_port}", "--once")
    assert (code, "is not an llmproxy" in err) == (1, True)


class OnTerminal:
    """`llmproxy top` on a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.arguments = arguments
        self.seen = ""
        self._read_more = asyncio.Event()

    async def __aenter__(self) -> OnTerminal:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmproxy", "top", *self.arguments, "--admin-key", KEY,
            stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment(),
        )  # fmt: skip
        asyncio.get_running_loop().add_reader(self.master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def _read(self) -> None:
        self.seen += os.read(self.master, 65536).decode(errors="replace")
        self._read_more.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not condition():
                await self._read_more.wait()
                self._read_more.clear()

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    async def ended(self) -> int:
        async with asyncio.timeout(20.0):
            return await self.process.wait()


async def test_keys_act_and_the_terminal_is_left_as_it_was(proxy: TestServer) -> None:
    async with OnTerminal(f"127.0.0.1:{proxy.port}") as top:
        await top.until(lambda: "replica ▲" in top.seen)
        assert termios.tcgetattr(top.slave) != top.before
        top.press("s")
        await top.until(lambda: "state ▲" in top.seen)
        top.press("q")
        assert await top.ended() == 0
        await top.until(lambda: "\x1b[?1049l" in top.seen)
        assert termios.tcgetattr(top.slave) == top.before
        assert top.seen.rindex("\x1b[?25h") > top.seen.rindex("\x1b[?25l")


async def test_a_signal_and_a_proxy_that_is_gone_leave_the_terminal_as_it_was(unused_tcp_port: int) -> None:
    async with OnTerminal(f"127.0.0.1:{unused_tcp_port}") as top:
        await top.until(lambda: "not reachable since" in top.seen)
        top.process.send_signal(signal.SIGTERM)
        assert await top.ended() == 0
        assert termios.tcgetattr(top.slave) == top.before
