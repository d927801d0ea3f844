"""The page in trouble: names that want to be markup, an outage, another process, a clock that is set, no JavaScript."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.browser.visit import ADMIN_KEY, VIEWS, WITH_KEY, visiting, worked
from tests.e2e.processes import served
from tests.e2e.proxies import FAST, HELLO, serving, until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>"\'&'
DENIED = """
for (const kind of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, kind, { get() { throw new DOMException("denied", "SecurityError"); } });
}
"""


async def test_a_browser_that_keeps_nothing(browser: Browser) -> None:
    afar = {"x-forwarded-for": "1.2.3.4"}
    async with serving(FAST, **WITH_KEY) as proxy, visiting(browser, proxy.url, extra_http_headers=afar) as visit:
        visit.expected = ("404 (Not Found)",)
        await visit.page.add_init_script(DENIED)
        await visit.go("now")
        await visit.sees("its admin key", "dialog[open]")
        await visit.page.fill("#admin-key", ADMIN_KEY)
        await visit.page.keyboard.press("Enter")
        await visit.sees("Healthy: 1 of 1 replica up", "#summary")
        before = await visit.page.evaluate("document.documentElement.dataset.theme")
        await visit.page.keyboard.press("t")
        assert await visit.page.evaluate("document.documentElement.dataset.theme") != before


async def test_replicas_without_history_are_named(browser: Browser) -> None:
    async with serving(FAST) as proxy, visiting(browser, proxy.url) as visit:

        async def many(route: Route) -> None:
            answer = await route.fetch()
            if answer.status == 204:
                await route.fulfill(response=answer)
                return
            live = await answer.json()
            live["backends"] *= 70
            await route.fulfill(response=answer, json=live)

        await visit.page.route("**/debug/live*", many)
        for view in ("replicas", "time"):
            await visit.go(view)
            await visit.page.reload()
            await visit.sees("The first 64 of 70 replicas have a history", "main")


async def test_an_outage_and_a_restart_under_an_open_page(browser: Browser) -> None:
    async with serving(FAST) as proxy, visiting(browser, proxy.url) as visit:
        visit.expected = ("ERR_FAILED",)
        await visit.go("now")
        await visit.sees("Healthy", "#summary")
        await visit.page.route("**/debug/**", lambda route: route.abort())
        await visit.sees("not reachable since", "#summary")
        await visit.page.unroute("**/debug/**")
        await visit.sees("Healthy", "#summary")

        async def restarted(route: Any) -> None:
            answer = await route.fetch()
            changed = (await answer.json()) | {"instance": "another", "second": 5, "now_s": 6.0}
            await route.fulfill(json=changed)

        await visit.page.route("**/debug/live*", restarted)
        await visit.sees("process another", "#footer")
        await visit.sees("Healthy", "#summary")


async def test_another_process_takes_the_place_of_the_one_under_an_open_page(browser: Browser, tmp_path: Path) -> None:
    """With workers: each of them serves the page, and all show the state of the scheduler."""
    async with Replica(FAST) as replica:
        log, arguments = tmp_path / "log", ("--workers", "2", "--backend", replica.url)
        async with served(log, "--port", "0", *arguments) as first:
            url = await first.url()
            page = visiting(browser, url)
            visit = await page.__aenter__()
            visit.expected = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET", "503")
            await visit.go("now")
            await visit.sees("Healthy: 1 of 1 replica up", "#summary")
            before = await visit.page.inner_text("#footer")
            first.process.terminate()
            await first.ended()
        await visit.sees("not reachable since", "#summary")
        async with served(log, "--port", url.rpartition(":")[2], *arguments):
            await visit.sees("Healthy: 1 of 1 replica up", "#summary")
            after = await visit.page.inner_text("#footer")
            assert after.partition("process ")[2].split()[0] != before.partition("process ")[2].split()[0]
            await page.__aexit__(None, None, None)


async def test_a_clock_that_is_set_moves_the_times_and_not_the_past(browser: Browser) -> None:
    async with serving(FAST) as proxy:
        await worked(proxy)
        async with visiting(browser, proxy.url) as visit:
            await visit.go("time")
            await visit.sees("one value every 1.00 s", "main")

            async def set_back(route: Route) -> None:
                answer = await route.fetch()
                if answer.status == 204:
                    await route.fulfill(response=answer)
                else:
                    await route.fulfill(response=answer, json=await answer.json() | {"unix_s": 1e9})

            await visit.page.route("**/debug/live*", set_back)
            then = await visit.page.evaluate("new Date(1e12).toLocaleTimeString('en-GB')")
            await visit.sees(f"the proxy's time is {then}", "#footer")
            await visit.sees(f"to {then[:5]}", ".actions p")
            async with visit.page.expect_download() as download:
                await visit.page.get_by_role("button", name="Save CSV").click()
            head, *lines = (await (await download.value).path()).read_text().splitlines()
            completed = head.split(",").index('"fleet/completed_per_s"')
            assert sum(float(line.split(",")[completed] or 0.0) for line in lines) == 4.0
            assert abs(float(lines[-1].split(",")[0]) - 1e9) < 5.0


async def test_names_are_never_markup(browser: Browser) -> None:
    async with serving(FAST, FAST, scheduling={"flow": "header:x-team"}) as proxy:
        team = {"x-team": HOSTILE, "x-request-id": "plain"}
        assert (await proxy.chat(HELLO, headers=team)).status == 200
        assert (await proxy.chat(HELLO | {"model": HOSTILE})).status == 404
        last = proxy.app.recorder.history.last_s
        await until(lambda: proxy.app.recorder.history.last_s > last)
        async with visiting(browser, proxy.url) as visit:
            for view in (*VIEWS, "requests/plain", f"requests/{HOSTILE.replace('/', '%2F')}"):
                visit.expected = ("404 (Not Found)",)
                await visit.go(view)
                await visit.sees("Healthy", "#summary")
                await asyncio.sleep(0.3)
                assert await visit.page.locator("main img, main script").count() == 0
                assert await visit.page.title() == "llmproxy"
            await visit.go("flows")
            await visit.sees(HOSTILE, "tbody")


@pytest.mark.parametrize(
    ("address", "seen"), [("requests/100%", "100%"), ("requests/%E0%A4%A", "%E0%A4%A"), ("constructor", "Bands,")]
)
async def test_an_address_that_makes_no_sense_is_still_a_page(browser: Browser, address: str, seen: str) -> None:
    async with serving(FAST) as proxy, visiting(browser, proxy.url) as visit:
        # The request is unknown to the proxy, and the console says that it was refused.
        visit.expected = ("404",)
        await visit.go(address)
        await visit.sees(seen, "h2")
