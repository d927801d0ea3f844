"""A page in a real browser that asks a proxy on another origin, by `fetch` and by OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.compat.commands import CommandFailed

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PAGE = Path(__file__).parent / "scripts" / "page.html"
LOADED_MAX_S = 60.0


def found_browser() -> str | None:
    """The path of a browser that is installed here."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class NoBrowser(CommandFailed):
    """No browser is installed here."""


async def pages(url: str, model: str, node: Path, scratch: Path) -> int:
    """Let a page ask the proxy at `url`. Returns how many requests it made; AssertionError where one failed."""
    report = await visited(url, model, node, scratch)
    assert report["fetch"]["status"] == 200, report
    assert report["fetch"]["pieces"] > 1, "it came in one piece, and not as it was made"
    assert report["fetch"]["done"], report
    assert report["fetch"]["requestId"] == "from-a-page", "an exposed field can be read"
    assert report["error"] == {"status": 404, "code": 404}, "an error can be read"
    assert report["sdk"]["pieces"] > 1, report
    assert report["sdk"]["outputTokens"] > 0, report
    return 3


async def refused_pages(url: str, model: str, node: Path, scratch: Path) -> int:
    """Let a page ask a proxy that allows no origins: each preflight is refused, and nothing else is sent."""
    report = await visited(url, model, node, scratch)
    assert all("failed" in report[name] for name in ("fetch", "error", "sdk")), report
    return 3


async def visited(url: str, model: str, node: Path, scratch: Path) -> dict[str, Any]:
    """Returns the report of a page of another origin (its own port) that calls the proxy at `url`."""
    report: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def page(_: web.Request) -> web.Response:
        text = PAGE.read_text().replace("$URL", url).replace("$MODEL", model)
        return web.Response(text=text, content_type="text/html")

    async def result(request: web.Request) -> web.Response:
        if not report.done():
            report.set_result(json.loads(await request.text()))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_post("/report", result)
    app.router.add_static("/openai", node / "node_modules" / "openai")
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return await _browse(f"http://127.0.0.1:{port}/", report, scratch)
    finally:
        await runner.cleanup()


async def _browse(address: str, report: asyncio.Future[dict[str, Any]], scratch: Path) -> dict[str, Any]:
    browser = found_browser()
    if browser is None:
        raise NoBrowser(f"no browser: install one of {', '.join(BROWSERS)}")
    process = await asyncio.create_subprocess_exec(
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
        f"--user-data-dir={scratch / 'browser'}", address,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return await asyncio.wait_for(report, LOADED_MAX_S)
    finally:
        process.terminate()
        await process.wait()
