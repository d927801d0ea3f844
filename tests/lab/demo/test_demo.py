"""The demo as a process: it serves, it leaves no process behind, and its display."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any
from urllib.error import HTTPError, URLError

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from rich.console import Console

from llmproxy.backends.state_file import state_path
from llmproxy.config import Config
from llmproxy.lab.demo import GUIDE, KEYS, _adapters, _config
from llmproxy.lab.demo.buttons import _press
from llmproxy.lab.demo.clients import ADAPTERS, CALM, MODEL, OUTCOMES, Outcomes, Source
from llmproxy.lab.demo.display import Display, demo_picture
from llmproxy.lab.demo.processes import DemoError, DemoReplica, Processes, reserved_port
from llmproxy.lab.demo.scenes import ADAPTER, ADMIN_KEY, BURST, FLOOD, LAST_ONES_S, NOISY, QUIET_S, SCENES, SLOW, Stage
from tests.dispatching import virtual
from tests.tools.top.test_picture import live

WAIT_MAX_S = 40.0


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    with process:
        try:
            yield process, process.stdout
        finally:
            process.kill()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_MAX_S) as answer:
        return bytes(answer.read())


def wait_until_refused(url: str) -> None:
    deadline_s = time.monotonic() + WAIT_MAX_S
    while time.monotonic() < deadline_s:
        try:
            get(f"{url}/health")
        except (URLError, ConnectionError):
            return
        time.sleep(0.05)
    pytest.fail(f"{url} still answers")


@pytest.mark.slow
def test_a_child_of_the_demo_ends_when_its_standard_input_does() -> None:
    with command("llmproxy.cli.child", "replica", "--port", "0", "--profile", "tiny") as (child, output):
        url = re.search(r"http://\S+", output.readline())
        assert url
        get(f"{url[0]}/health")
        assert child.stdin
        child.stdin.close()
        assert child.wait(WAIT_MAX_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_demo_leaves_nothing_behind(number: signal.Signals) -> None:
    with command("llmproxy", "demo", "--port", "0", "--replicas", "2") as (demo, output):
        guide = guide_of(output)
        base = re.search(r"curl (http://[\d.:]+)", guide)
        assert base
        replicas = re.findall(r'llmproxy_backend_limit{.*?backend="([^"]+)"', get(f"{base[1]}/metrics").decode())
        assert len(replicas) == 2
        served = json.loads(get(f"{base[1]}/v1/models"))
        assert {card["id"] for card in served["data"]} == {MODEL, *ADAPTERS}
        demo.send_signal(number)
        rest = output.read()
        assert demo.wait(WAIT_MAX_S) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert "Traceback" not in rest
        assert "\x1b" not in guide + rest
        assert all(len(line) <= 80 for line in (guide + rest).splitlines())
        for url in (base[1], *(f"http://{replica}" for replica in replicas)):
            wait_until_refused(url)


def guide_of(output: IO[str]) -> str:
    guide = ""
    while "Ctrl-C ends all" not in guide:
        line = output.readline()
        assert line, guide
        guide += line
    return guide


@pytest.mark.slow
def test_buttons_on_the_page_play_scenes() -> None:
    with command("llmproxy", "demo", "--port", "0", "--replicas", "1") as (_, output):
        base = re.search(r"curl (http://[\d.:]+)", guide_of(output))
        assert base
        page = get(f"{base[1]}/ui").decode()
        places = {name: place for place, name in re.findall(r'data-place="([^"]+)"[^>]*>([^<]+)<', page)}
        assert list(places) == [scene.name for scene in SCENES if scene.name != "kill"] + ["play all"]
        # The page asks with the key of the demo from its first question on.
        assert page.index("/ui/buttons.js") < page.index("/ui/app.js")
        assert b"key.set(" in get(f"{base[1]}/ui/buttons.js")
        cold = urllib.request.Request(base[1] + places[ADAPTER.name], method="POST")
        with pytest.raises(HTTPError, match="401"):
            urllib.request.urlopen(cold, timeout=WAIT_MAX_S)
        cold.add_header("Authorization", f"Bearer {ADMIN_KEY}")
        urllib.request.urlopen(cold, timeout=WAIT_MAX_S).close()
        news = ""
        while ADAPTER.message not in news:
            news = output.readline()
            assert news
            # By itself, the demo would play this one before.
            assert SLOW.message not in news
        events: list[Any] = []
        while not events:
            asked = urllib.request.Request(f"{base[1]}/debug/events", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
            with urllib.request.urlopen(asked, timeout=WAIT_MAX_S) as answer:
                events = [one for one in json.load(answer)["events"] if one["event"] == "scene"]
            time.sleep(0.05)
        assert ADAPTER.message in events[0]["text"]


def test_a_pressed_button_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe2(os.O_DIRECT)  # Each read of such a pipe gets one write.
    with os.fdopen(reader, "rb", 0) as pipe, os.fdopen(writer, "wb", 0) as end:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(end, write_through=True))
        _press("a", make_mocked_request("POST", "/"))
        assert pipe.read(4096) == b"\nscene:a\n"


def test_the_demo_keeps_out_of_the_state_file_of_others() -> None:
    config = Config.model_validate(
        _config(8080, [DemoReplica("replica-1", 1, ADAPTERS), DemoReplica("replica-16", 2, ())])
    )
    assert state_path(config.state_file, {"XDG_STATE_HOME": "/elsewhere"}, "127.0.0.1", 8080) is None
    assert config.host == "127.0.0.1"
    assert [backend.name for backend in config.backends] == ["replica-1", "replica-16"]


@pytest.mark.slow
async def test_a_child_that_dies_ends_the_demo_with_its_last_words() -> None:
    async with Processes() as processes:
        await processes.start("replica-1", "replica", "--profile", "none")
        with pytest.raises(DemoError, match=r"replica-1 ended with exit code 2; its last lines:\n.* no engine profile"):
            await processes.unless_one_dies(asyncio.sleep(WAIT_MAX_S))


@pytest.mark.slow
async def test_killed_replica_comes_back_on_its_port() -> None:
    async def answered() -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get("/health") as answer:
                    assert answer.status == 200
                    return
            await asyncio.sleep(0.02)

    with reserved_port(0) as port:
        async with Processes() as processes, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for _ in range(2):
                await processes.start("replica-1", "replica", "--port", str(port), "--profile", "tiny")
                await processes.unless_one_dies(answered())
                await processes.kill("replica-1")
                with pytest.raises(aiohttp.ClientConnectionError):
                    await session.get("/health")
            await processes.unless_one_dies(asyncio.sleep(0))


def test_a_port_that_is_taken_is_reported() -> None:
    with reserved_port(0) as port, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(DemoError, match=f"port {port} cannot be used"), reserved_port(port):
            pass


@pytest.mark.parametrize("count", range(1, 17))
def test_every_adapter_is_loaded_on_a_replica_that_stays(count: int) -> None:
    stays = [_adapters(number, count) for number in range(1, count + (count == 1))]
    assert {adapter for loaded in stays for adapter in loaded} == set(ADAPTERS)


# --- what it shows ----------------------------------------------------------------------------------------------------

BANDS = {
    "critical": Outcomes(answered=123456, retried=1234, refused=12345, broken=123, lost=12),
    "default": Outcomes(),
}


def drawn(height: int | None, message: str) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(demo_picture(live(), BANDS, 80, height, message))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in shown.splitlines())
    return [line.rstrip() for line in shown.splitlines()]


@pytest.mark.parametrize("height", [None, 24, 60])
def test_the_picture_of_top_has_the_results_of_the_clients(height: int | None) -> None:
    lines = drawn(height, "12:00:00  news")
    rows = [line.split() for line in lines]
    at = rows.index(["clients", *OUTCOMES])
    assert rows[at + 1] == ["critical", "123,456", "1,234", "12,345", "123", "12"]
    assert rows.index(["default", "0", "0", "0", "0", "0"]) == at + 2
    # The replicas are above, and nothing fills the lines that are left.
    assert any(row[:1] == ["replica"] for row in rows[:at])
    assert lines[-1] == "12:00:00  news"
    assert lines[-2]


def test_what_is_said_fits_into_80_columns() -> None:
    keys = KEYS.format(keys=", ".join(f"{scene.key} {scene.name}" for scene in SCENES))
    names = {"models": ", ".join((MODEL, *ADAPTERS)), "model": MODEL, "key": ADMIN_KEY, "scenes": keys}
    guide = GUIDE.format(base="http://127.0.0.1:65535", count=16, **names)
    news = ["00:00:00  " + scene.message.format(victim="replica-16") for scene in SCENES]
    assert [line for line in [*guide.splitlines(), *news] if len(line) > 80] == []
    assert all(f"{column}: " in guide for column in ("waiting", "load", "broken", "lost"))


# --- scenes -----------------------------------------------------------------------------------------------------------


class Played:
    """A stage whose processes and replicas only note what happens to them."""

    def __init__(self, *, single_replica: bool = False) -> None:
        self.seen: list[str] = []
        self.sources: set[Source] = set(CALM)
        itself: Any = self
        self.stage = Stage(
            itself, itself, "replica-3", "http://r3", single_replica, self.restart, self.seen.append, self.sources
        )

    async def kill(self, name: str) -> None:
        self.seen.append(f"kill {name}")

    async def restart(self) -> None:
        self.seen.append("restart")

    @contextlib.asynccontextmanager
    async def post(self, url: str, json: dict[str, object], headers: dict[str, str]) -> AsyncIterator[Any]:
        assert headers["authorization"].endswith(ADMIN_KEY)
        self.seen.append(f"{url} {' '.join(str(value) for value in json.values())}")
        yield self

    async def read(self) -> None: ...


@virtual
async def test_every_scene_ends_what_it_began() -> None:
    for scene in SCENES:
        played = Played()
        task = played.stage.begin(scene)
        await asyncio.sleep(scene.seconds / 2)
        assert played.sources == {*CALM, *scene.sources}
        assert played.stage.begin(scene) is task, "each at most once at a time"
        await task
        assert played.sources == set(CALM)
        assert played.seen[0] == scene.message.format(victim="replica-3")
        assert played.seen[1] == f"{scene.path}/began "
        assert played.seen[-1] == f"{scene.name}: over"
        assert played.seen[2:-1] == {
            "kill": ["kill replica-3", "restart"],
            "slow": ["http://r3/sim/fault slow 8.0", "http://r3/sim/fault None"],
            "adapter": [
                "/v1/load_lora_adapter sim-8b-legal /demo/legal",
                "/v1/unload_lora_adapter sim-8b-legal",
            ],
        }.get(scene.name, [])


@virtual
async def test_an_adapter_is_unloaded_once_its_last_requests_had_time_to_be_served() -> None:
    played = Played()
    task = played.stage.begin(ADAPTER)
    await asyncio.sleep(ADAPTER.seconds + LAST_ONES_S - 0.1)
    assert played.sources == set(CALM)
    assert not any("unload" in line for line in played.seen)
    await task
    assert any("unload" in line for line in played.seen)


@virtual
async def test_the_demo_leads_until_a_key_is_pressed_and_again_after_a_blank() -> None:
    played = Played()
    leading = asyncio.create_task(played.stage.lead())
    await asyncio.sleep(QUIET_S + 1.0)
    assert played.seen[-2:] == [FLOOD.message, f"{FLOOD.path}/began "]
    played.stage.pressed("N")
    await asyncio.sleep(1_000.0)
    assert NOISY.message in played.seen
    assert BURST.message not in played.seen, "the person leads"
    played.stage.pressed("x")
    played.stage.pressed(" ")
    await asyncio.sleep(1.0)
    assert BURST.message in played.seen
    leading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leading
    assert played.sources == set(CALM)


@virtual
async def test_a_lone_replica_is_not_killed() -> None:
    played = Played(single_replica=True)
    played.stage.pressed("k")
    await asyncio.sleep(1.0)
    assert played.seen == []
    assert {scene.name for scene in SCENES} - {scene.name for scene in played.stage.scenes} == {"kill"}


@pytest.mark.parametrize(
    ("environment", "drawn", "coloured"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, False),
    ],
)
async def test_a_terminal_gets_what_it_can_show(
    environment: dict[str, str], drawn: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:  # noqa: ASYNC230, PTH123
        monkeypatch.setattr(sys, "stdout", terminal)
        display = Display()
        display.plain_interval_s = 0.0
        with display.drawn():
            display.show_message("now")
            display.show(live(), BANDS)
        monkeypatch.undo()
        seen = b""
        # What was written gets through by and by.
        while b"123,456" not in seen or not seen.endswith(b"\x1b[?25h" if drawn else b"\r\n\r\n"):
            seen += os.read(master, 1 << 16)
    os.close(master)
    assert (b"\x1b" in seen) is drawn
    assert bool(re.search(rb"\x1b\[(?:\d+;)*(?:3\d|9\d)m", seen)) is coloured
    # The cursor is back.
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == drawn
