"""A visit of the page, with everything that went wrong on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from llmproxy.config import hash_of
from tests.e2e.proxies import HELLO, ProxyUnderTest, until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

VIEWS = ("now", "replicas", "flows", "requests", "decisions", "caches", "time", "configuration")
ADMIN_KEY = "for-admins"
WITH_KEY: dict[str, Any] = {"admin_key": hash_of(ADMIN_KEY)}


class Visit:
    """An open page, and all errors on it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.wrong: list[str] = []
        self.expected: tuple[str, ...] = ()
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda asked: self._foreign(asked.url))

    def _foreign(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.wrong.append(f"it asked {url}")

    async def go(self, view: str) -> None:
        await self.page.goto(f"{self.url}/ui#{view}")

    async def sees(self, text: str, selector: str = "body") -> None:
        await self.page.locator(selector, has_text=text).first.wait_for(timeout=10_000)

    def check(self) -> None:
        assert [one for one in self.wrong if not any(part in one for part in self.expected)] == []


@asynccontextmanager
async def visiting(browser: Browser, url: str, **options: Any) -> AsyncIterator[Visit]:
    context = await browser.new_context(**options)
    try:
        visit = Visit(await context.new_page(), url)
        yield visit
        visit.check()
    finally:
        await context.close()


async def worked(proxy: ProxyUnderTest) -> None:
    """Some requests of two flows ended, and their second is over."""
    for name in ("one", "two", "three"):
        assert (await proxy.chat(HELLO, headers={"x-request-id": name})).status == 200
    assert (await proxy.chat(HELLO | {"model": "lora-0"}, headers={"x-request-id": "tuned"})).status == 200
    assert (await proxy.chat(HELLO | {"model": "nothing"}, headers={"x-request-id": "lost"})).status == 404
    last = proxy.app.recorder.history.last_s
    await until(lambda: proxy.app.recorder.history.last_s > last)
