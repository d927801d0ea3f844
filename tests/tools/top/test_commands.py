"""The commands against a server: output, error messages, and the state of the terminal at the end."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from llmproxy.tools.top.ask import ANSWER_BYTES_MAX

LIVE, STORY = (Path(__file__).parent / name for name in ("live.json", "story.json"))
KEY = "secret"


def proxy_at(port: int | None = None) -> TestServer:
    """A server that answers like an llmproxy to a client with the admin key."""

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            nothing = {"error": {"message": f"There is nothing at {request.path}."}}
            return web.json_response(nothing, status=404, headers={"Server": "llmproxy"})
        shown = LIVE if request.path == "/debug/live" else STORY
        return web.Response(body=shown.read_bytes(), content_type="application/json")

    app = web.Application()
    app.router.add_get("/debug/{name}", answer)
    return TestServer(app, port=port)


@pytest.fixture
async def proxy() -> AsyncIterator[TestServer]:
    server = proxy_at()
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


@pytest.mark.slow
async def test_one_picture_and_the_document(proxy: TestServer) -> None:
    url = f"127.0.0.1:{proxy.port}"
    code, out, _ = await printed("top", url, "--once")
    assert (code, max(map(len, out.splitlines()))) == (0, 80)
    assert "sheddable" in out
    assert "\x1b" not in out
    code, out, _ = await printed("top", url, "--json")
    assert (code, json.loads(out)) == (0, json.loads(LIVE.read_text()))
    code, out, _ = await printed("explain", "f7bb", url)
    assert (code, "completed (200) after 0.225 s" in out) == (0, True)


@pytest.mark.slow
async def test_errors_are_for_people(proxy: TestServer, unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{proxy.port}"
    refused = await printed("top", url, "--once", key="")
    assert refused[0] == 1
    assert "--admin-key" in refused[2]
    assert "refuses this admin key" in (await printed("top", url, "--once", key="wrong"))[2]
    assert "not reachable: " in (await printed("explain", "a", f"127.0.0.1:{unused_tcp_port}"))[2]


async def test_server_that_is_no_proxy_is_an_error(unused_tcp_port: int) -> None:
    async with TestServer(web.Application(), port=unused_tcp_port):
        code, _, err = await printed("top", f"127.0.0.1:{unused_tcp_port}", "--once")
    assert (code, "is not an llmproxy" in err) == (1, True)


@pytest.mark.slow
async def test_a_body_without_end_is_left(unused_tcp_port: int) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65_536)
            sent += 65_536

    app = web.Application()
    app.router.add_get("/debug/live", endless)
    async with TestServer(app, port=unused_tcp_port):
        code, _, err = await printed("top", f"127.0.0.1:{unused_tcp_port}", "--once")
    assert (code, err.count("\n"), "more than 16 MB" in err) == (1, 1, True)
    assert sent < 2 * ANSWER_BYTES_MAX


class AlternateScreen(pyte.Screen):
    """An emulation of the alternate screen, which pyte lacks: empty after it is left, and exits are counted."""

    left = 0

    def reset_mode(self, *modes: int, **kwargs: Any) -> None:
        super().reset_mode(*modes, **kwargs)
        if 1049 in modes:
            self.left += 1
            self.erase_in_display(2)


class OnTerminal:
    """`llmproxy top` on a pseudo terminal of 80 columns and 24 lines; `screen` is the visible text."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.arguments = arguments
        self._screen = AlternateScreen(80, 24)
        self._stream = pyte.ByteStream(self._screen)
        self._read_more = asyncio.Event()

    async def __aenter__(self) -> OnTerminal:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmproxy", "top", *self.arguments, "--admin-key", KEY,
            stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment(), start_new_session=True,
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
        self._stream.feed(os.read(self.master, 65536))
        self._read_more.set()

    @property
    def screen(self) -> str:
        return "\n".join(self._screen.display)

    async def shows(self, text: str, *, left: int = 0) -> None:
        """Wait until the screen has the text, after this many exits from the alternate screen."""
        async with asyncio.timeout(20.0):
            while self._screen.left < left or text not in self.screen:
                await self._read_more.wait()
                self._read_more.clear()

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    async def ended(self) -> int:
        """The exit status. Asserts that the terminal and its cursor are restored."""
        async with asyncio.timeout(20.0):
            status = await self.process.wait()
        assert termios.tcgetattr(self.slave) == self.before
        await self.shows("", left=1)
        assert self.screen.isspace()
        assert not self._screen.cursor.hidden
        return status


async def test_keys_act_at_once_and_the_terminal_is_left_as_it_was(proxy: TestServer) -> None:
    async with OnTerminal(f"127.0.0.1:{proxy.port}", "--interval", "3600") as top:
        await top.shows("replica ▲")
        assert termios.tcgetattr(top.slave) != top.before
        top.press("s")
        await top.shows("state ▲")
        top.press("/another\x1b[A\r")
        await top.shows("filter: another  q quit")
        assert "replica-1" not in top.screen
        top.press("\x1b?")
        await top.shows("sort the replicas by the next column")
        top.press("q")
        assert await top.ended() == 0


@pytest.mark.slow
async def test_a_proxy_that_ends_and_comes_back(unused_tcp_port: int) -> None:
    async with OnTerminal(f"127.0.0.1:{unused_tcp_port}") as top:
        await top.shows("not reachable since")
        async with proxy_at(unused_tcp_port):
            await top.shows("replica-1  up")
            assert "not reachable" not in top.screen
        await top.shows("not reachable since")
        assert "replica-1  up" in top.screen
        top.process.send_signal(signal.SIGTERM)
        assert await top.ended() == 0


@pytest.mark.slow
async def test_terminal_is_not_suspended_without_a_shell(proxy: TestServer) -> None:
    async with OnTerminal(f"127.0.0.1:{proxy.port}") as top:
        await top.shows("replica ▲")
        top.process.send_signal(signal.SIGTSTP)
        await top.shows("replica ▲", left=1)
        top.press("q")
        assert await top.ended() == 0
