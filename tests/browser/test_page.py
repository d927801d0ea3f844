"""The page in a real browser: every view, the actions of a person, and errors that must never happen."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.visit import ADMIN_KEY, VIEWS, WITH_KEY, visiting, worked
from tests.e2e.proxies import FAST, HELLO, one_seat, serving, until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route

FIRST_PAINT_BYTES_MAX = 300_000
LONG = "team-" * 30


async def test_every_view_is_clean_and_accessible_in_both_themes(browser: Browser, axe: str) -> None:
    async with serving(FAST, FAST) as proxy:
        await worked(proxy)
        for theme in ("light", "dark"):
            async with visiting(browser, proxy.url, color_scheme=theme, bypass_csp=True) as visit:
                await visit.page.add_init_script(axe)
                for view in VIEWS:
                    await visit.go(view)
                    await visit.sees("Healthy: 2 of 2 replicas up", "#summary")
                    await visit.sees("b0", "main") if view in ("now", "replicas", "caches") else None
                    await asyncio.sleep(0.3)
                    found = await visit.page.evaluate("axe.run()")
                    serious = [
                        (view, theme, one["id"], one["nodes"][0]["html"][:200])
                        for one in found["violations"]
                        if one["impact"] in ("serious", "critical")
                    ]
                    assert serious == []


@pytest.mark.parametrize("width", [375, 1280, 2560])
async def test_no_view_is_wider_than_the_window(browser: Browser, width: int) -> None:
    async with serving(FAST, FAST, scheduling={"flow": "header:x-team"}) as proxy:
        assert (await proxy.chat(HELLO, headers={"x-team": LONG})).status == 200
        await worked(proxy)
        async with visiting(browser, proxy.url, viewport={"width": width, "height": 900}) as visit:
            for view in VIEWS:
                await visit.go(view)
                await visit.sees("Healthy", "#summary")
                await asyncio.sleep(0.2)
                assert await visit.page.evaluate("document.documentElement.scrollWidth") <= width, view
                link = await visit.page.locator("nav [aria-current]").bounding_box()
                assert link is not None
                assert -1 < link["x"] < link["x"] + link["width"] < width + 1, f"{view} is not seen to be here"
            await visit.go("flows")
            assert await visit.page.locator("th[scope=row]", has_text=LONG).first.get_attribute("title") == LONG


async def test_page_shows_the_served_requests(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy:
        await worked(proxy)
        async with visiting(browser, proxy.url) as visit:
            await visit.go("now")
            await visit.sees("4 requests in", ".tiles")
            await visit.go("requests")
            for name in ("one", "two", "three", "tuned", "lost"):
                await visit.sees(name, "tbody")
            await visit.page.select_option("#filter-kind", "client_error")
            await visit.page.locator("tbody tr").nth(1).wait_for(state="detached")
            assert await visit.page.locator("tbody tr").all_inner_texts() != []
            await visit.sees("lost", "tbody")
            await visit.page.fill("#find", "two")
            await visit.page.keyboard.press("Enter")
            await visit.sees("Band default, model base, flow base, from 127.0.0.1, with Python/", "main")
            await visit.sees("completed (200)", "main")
            await visit.sees("✓ b", ".prices")
            await visit.go("requests/lost")
            await visit.sees("It was sent to no replica.", "main")
            assert "no longer among them" not in await visit.page.inner_text("main")
            await visit.go("configuration")
            await visit.sees("queue.max_wait_s", "tbody")
            await visit.page.fill("#find", "ttl")
            assert await visit.page.locator("tbody tr").count() == len(
                [one for one in (await proxy.get("/debug/config")).json["settings"] if "ttl" in json.dumps(one)]
            )


async def test_choices_are_filtered_by_outcome(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy:
        await worked(proxy)
        async with visiting(browser, proxy.url) as visit:
            found = visit.page.locator("main .card h3")
            await visit.go("decisions")
            await visit.sees("base, band default: completed after", "main")
            for text, names in (
                ("lora-0", ["tuned"]),
                ("COMPLETED", ["tuned", "three", "two", "one"]),
                ("expired", []),
            ):
                await visit.page.fill("#find", text)
                if not names:
                    await visit.sees("None of the last choices fits.", "main")
                await found.nth(len(names)).wait_for(state="detached")
                await found.nth(len(names) - 1).wait_for() if names else None
                assert await found.all_inner_texts() == names


async def test_cheapest_of_many_candidates_are_shown(browser: Browser) -> None:
    async with serving(FAST) as proxy:
        await worked(proxy)
        async with visiting(browser, proxy.url) as visit:

            async def many(route: Route) -> None:
                explained = await (await route.fetch()).json()
                for choice in explained["pools"][0]["choices"]:
                    choice["candidates"] = [choice["candidates"][0] | {"total_s": i / 100} for i in range(1, 201)]
                await route.fulfill(json=explained)

            await visit.page.route("**/debug/explain*", many)
            await visit.go("decisions")
            await visit.sees("190 more candidates, of 110 ms to 2.00 s.", "main")
            assert await visit.page.locator("main .prices").first.locator("li").count() == 10


async def test_times_are_written_as_closely_as_they_are_read(browser: Browser) -> None:
    async with serving(FAST) as proxy, visiting(browser, proxy.url) as visit:
        await visit.go("now")
        times = [0.0004, 0.25, 1.5, 60, 99.9, 100, 300, 599, 7200]
        shown = await visit.page.evaluate(f"import('/ui/lib/format.js').then((m) => {times}.map(m.duration))")
        assert shown == ["0 ms", "250 ms", "1.50 s", "60.0 s", "99.9 s", "1.7 min", "5 min", "10 min", "2 h"]


async def test_waiting_requests_have_a_reason(browser: Browser) -> None:
    async with one_seat() as (proxy, seat):
        waits = await proxy.enter("waits")
        async with visiting(browser, proxy.url) as visit:
            await visit.go("now")
            await visit.sees("base: 1 default request waits", "#summary")
            await visit.sees("Why: no backend has room.", ".band[data-band=default]")
            await visit.go("flows")
            await visit.sees("waits, began within the minute", "tr:has-text('base') td")
            await visit.page.get_by_role("link", name="waits").click()
            await visit.sees("In band default, flow base", "main")
        seat.close()
        assert (await waits).status == 200


async def test_whether_a_flow_that_waits_has_its_share(browser: Browser) -> None:
    async with serving(FAST) as proxy, visiting(browser, proxy.url) as visit:
        await visit.go("flows")

        async def words(share: float | None, waiting: int = 3, oldest_s: float = 2.0, before: float = 100.0) -> str:
            one = {"band": "default", "share": share, "due": 0.5, "waiting": waiting, "oldest_s": oldest_s}
            flows = [one, one | {"share": 0.7, "waiting": 9, "oldest_s": 5.0}, one | {"band": "critical", "share": 0.9}]
            asked = (
                f"import('/ui/views/flows.js').then((m) => m.fair({json.dumps(one)}, {json.dumps(flows)}, {before}))"
            )
            return str((await visit.page.evaluate(asked))[1])

        assert await words(0.1, waiting=0) == "does not wait"
        assert await words(0.46) == "waits, has its share"
        assert await words(0.1, before=0.0) == "waits, began within the minute"
        assert await words(None, before=0.0) == "waits, began within the minute"
        assert await words(0.1) == "waits less than flows above their share"
        assert await words(0.1, oldest_s=6.0) == "waits, below its share"


async def test_the_first_paint_is_small_and_soon(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy:
        await worked(proxy)
        async with visiting(browser, proxy.url) as visit:
            session = await visit.page.context.new_cdp_session(visit.page)
            sizes: list[float] = []
            session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
            await session.send("Network.enable")
            await visit.go("now")
            await visit.sees("4 requests in", ".tiles")
            assert 10_000 < sum(sizes) < FIRST_PAINT_BYTES_MAX


async def test_a_replica_that_is_up_says_how_often_it_was_not(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy:
        for name in ("ejected", "ejected", "back", "ejected", "down", "back", "up"):
            why = {"why": f"the reason to be {name}"} if name in ("ejected", "down") else {}
            proxy.app.recorder.heard("info", f"backend_{name}", {"backend": "b1"} | why)
        async with visiting(browser, proxy.url) as visit:
            await visit.go("replicas")
            await visit.sees("not up 2 times in 5 min, last at ", "tr:has-text('b1')")
            await visit.sees(": the reason to be down", "tr:has-text('b1')")
            assert "not up" not in await visit.page.locator("tr", has_text="b0").first.inner_text()
            await visit.page.locator("tr:has-text('b1') a").click()
            await visit.sees("backend_down", ".events")


async def test_slow_replica_is_highlighted(browser: Browser) -> None:
    async with serving(FAST, FAST, FAST) as proxy, visiting(browser, proxy.url) as visit:

        async def slower(route: Any) -> None:
            document = await (await route.fetch()).json()
            for one, tpot_s, slower in zip(document["backends"], (0.008, 0.019, 0.009), (1.0, 2.1, 1.1), strict=True):
                one |= {"tpot_s": tpot_s, "tokens_slower": slower}
            await route.fulfill(json=document)

        await visit.page.route("**/debug/live*", slower)
        for view in ("now", "replicas"):
            await visit.go(view)
            await visit.sees("19 ms, 2.1x", "tr:has-text('b1') td.highlighted")
            assert await visit.page.locator("td.highlighted").count() == 1
        region = await visit.page.locator(".scroll", has_text="Token pace").first.bounding_box()
        pace = await visit.page.locator("th", has_text="Token pace").bounding_box()
        assert region is not None
        assert pace is not None
        assert pace["x"] + pace["width"] <= region["x"] + region["width"], "the pace is out of sight"


async def test_how_many_replicas_are_wanted(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy, visiting(browser, proxy.url) as visit:
        await visit.go("now")
        await visit.sees("2 up; too little is known yet", ".tile")

        async def known(route: Any) -> None:
            (pool,) = (await (await route.fetch()).json())["pools"]
            terms = {"work": 0.5, "ahead": 0.5, "queue": 0.3, "seats": 0.1, "kv": 0.0, "adapters": 4.0}
            number = {"sure": True, "need": 4.0, "desired": 4, "reason": "adapters", "terms": terms}
            await route.fulfill(json={"pools": [pool | number]})

        await visit.page.route("**/scale", known)
        await visit.sees("2 up; full at 2.5x the recent load, low bands aside", ".tile")
        await visit.go("replicas")
        row = visit.page.locator("tr", has_text="adapters in use")
        shown = (await row.inner_text()).split("\t")
        assert shown[:6] == ["base", "2", "4.00", "4", "adapters in use", "2.5x the recent load"]


async def test_result_of_the_last_reload_is_shown(browser: Browser) -> None:
    async with serving(FAST) as proxy, visiting(browser, proxy.url) as visit:
        heard = proxy.app.recorder.heard
        await visit.go("configuration")
        await visit.sees("No reload since the start.", "main")
        heard("info", "config_changed", {"change": "log_level: info -> debug"})
        heard("info", "reloaded", {"changes": 1, "needs_restart": 0})
        await visit.sees("In force: log_level: info -> debug", "#reload")
        heard("info", "config_changed", {"change": "queue.max_wait_s: 60 -> 30"})
        heard("warning", "needs_a_restart", {"change": "workers: 1 -> 2"})
        heard("info", "reloaded", {"changes": 1, "needs_restart": 1})
        await visit.sees("Needs a restart: workers: 1 -> 2", "#reload")
        assert await visit.page.locator("#reload li").all_inner_texts() == [
            "In force: queue.max_wait_s: 60 -> 30",
            "Needs a restart: workers: 1 -> 2",
        ]
        heard("error", "reload_failed", {"cause": "file", "problem": "llmproxy.yaml:2: no valid YAML"})
        await visit.sees("Refused; the previous settings stay in force: llmproxy.yaml:2: no valid YAML", "#reload")


async def test_an_adapter_is_shown_in_words(browser: Browser) -> None:
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with serving(FAST, FAST, **WITH_KEY) as proxy, visiting(browser, proxy.url, extra_http_headers=key) as visit:
        body = {"lora_name": "legal", "lora_path": "/adapters/legal"}
        await proxy.post("/v1/load_lora_adapter", body, headers=key)
        await visit.go("caches")
        await visit.sees("legal Loaded for base from /adapters/legal: 2 of 2 replicas.", "main")
        await worked(proxy)
        await visit.sees("prompt tokens/s came from caches. A replica computes", "main")
        await visit.sees("in a slot", "tr:has-text('lora-0') td")


async def test_a_drain_needs_a_key(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy, visiting(browser, proxy.url) as visit:
        visit.expected = ("401 (Unauthorized)",)
        await visit.go("replicas")
        await visit.page.get_by_role("button", name="Drain b1").click()
        await visit.sees("A drain needs the admin key", "dialog[open]")


async def test_configured_key_is_asked_for_on_this_machine_too(browser: Browser) -> None:
    async with serving(FAST, FAST, **WITH_KEY) as proxy, visiting(browser, proxy.url) as visit:
        visit.expected = ("401 (Unauthorized)",)
        await visit.go("replicas")
        await visit.sees("its admin key", "dialog[open]")
        await visit.page.fill("#admin-key", ADMIN_KEY)
        await visit.page.keyboard.press("Enter")
        await visit.page.get_by_role("button", name="Drain b1").click()
        await visit.page.get_by_role("button", name="Undrain b1").wait_for()
        await visit.sees("b1 is drained", "#summary")
        await visit.page.get_by_role("button", name="Undrain b1").click()
        await visit.page.get_by_role("button", name="Drain b1", exact=True).wait_for()


async def test_from_afar_it_asks_for_the_key(browser: Browser) -> None:
    afar = {"x-forwarded-for": "1.2.3.4"}
    async with serving(FAST, **WITH_KEY) as proxy, visiting(browser, proxy.url, extra_http_headers=afar) as visit:
        visit.expected = ("404 (Not Found)",)
        await visit.go("now")
        await visit.sees("its admin key", "dialog[open]")
        for wrong in ("wrong", "wro\N{HORIZONTAL ELLIPSIS}"):
            await visit.page.fill("#admin-key", wrong)
            await visit.page.keyboard.press("Enter")
            await visit.sees("This key was refused", "dialog[open]")
            await visit.sees("only with its admin key", "#summary")
        await visit.page.fill("#admin-key", ADMIN_KEY)
        await visit.page.keyboard.press("Enter")
        await visit.sees("Healthy: 1 of 1 replica up", "#summary")


async def test_a_moment_before_the_span_of_the_plots_is_shown(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy, visiting(browser, proxy.url) as visit:
        page, span = visit.page, visit.page.locator("#span input:checked")
        proxy.app.recorder.heard("info", "backend_up", {"backend": "b0"})
        await visit.go("time")
        await visit.sees("backend_up", ".events")
        assert await span.input_value() == "300"
        now = datetime.now(UTC).astimezone()
        await visit.go(f"time/{now.timestamp() - 1_800:.0f}")
        await visit.sees("one value every 10.0 s", "main")
        assert await span.input_value() == "3600"
        await visit.sees("Nothing happened in this time.", ".card")
        assert await page.locator(".events li").count() == 0
        await page.fill("#moment", f"{now:%H:%M:%S}")
        await page.get_by_role("button", name="Show").click()
        await visit.sees("backend_up", ".events")
        place = await page.locator(".events li", has_text="backend_up").first.bounding_box()
        assert place is not None
        assert place["y"] < 720, "what happened is seen without scrolling"
        await page.fill("#moment", f"{now + timedelta(minutes=5):%H:%M:%S}")
        await page.get_by_role("button", name="Show").click()
        await visit.sees("Nothing happened in this time.", ".card")
        assert await span.input_value() == "86400"


async def test_the_values_and_the_events_of_the_moment_that_was_asked_for(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy:
        recorder = proxy.app.recorder
        for serial in range(30):
            recorder.heard("info", "before", {"serial": serial})
        await worked(proxy)
        [ended_s] = [one.ended_s or 0.0 for one in recorder.recent.newest_first() if one.request_id == "one"]
        await until(lambda: recorder.history.last_s > ended_s + 3)
        for serial in range(30):
            recorder.heard("info", "after", {"serial": serial})
        live = (await proxy.get("/debug/live")).json
        async with visiting(browser, proxy.url) as visit:
            await visit.go("time")
            completed = visit.page.locator("figure", has_text="Requests that ended").locator("tr", has_text="completed")
            await completed.wait_for()
            assert await completed.locator("td").inner_text() == "0"
            await visit.go(f"time/{live['unix_s'] - live['now_s'] + ended_s}")
            row = visit.page.locator(".events [aria-current=time]")
            await row.wait_for()
            assert " before serial=" in await row.inner_text()
            place, shown = await row.bounding_box(), await visit.page.locator(".events").bounding_box()
            assert place is not None
            assert shown is not None
            assert shown["y"] < place["y"] < shown["y"] + shown["height"], "it has to be looked for"
            assert float(await completed.locator("td").inner_text()) >= 1
            await visit.page.get_by_role("button", name="Whole span").click()
            await row.wait_for(state="detached")
            assert await completed.locator("td").inner_text() == "0"


async def test_the_time_at_which_a_request_ended_stays(browser: Browser) -> None:
    async with serving(FAST) as proxy:
        await worked(proxy)
        async with visiting(browser, proxy.url) as visit:
            asked = 0

            async def once(route: Route) -> None:
                nonlocal asked
                asked += 1
                await (route.continue_() if asked == 1 else route.abort())

            visit.expected = ("ERR_FAILED",)
            await visit.page.route("**/debug/requests*", once)
            await visit.go("requests")
            ended = visit.page.locator("tbody tr", has_text="one").locator("td").first
            first = await ended.inner_text()
            for _ in range(2):
                await visit.page.locator("footer", has_text=await visit.page.inner_text("footer")).wait_for(
                    state="detached"
                )
            await visit.page.get_by_role("button", name="Ended").click()
            assert await ended.inner_text() == first


async def test_zoom_span_theme_pause_and_files(browser: Browser) -> None:
    async with serving(FAST, FAST) as proxy:
        await worked(proxy)
        async with visiting(browser, proxy.url, color_scheme="light") as visit:
            page = visit.page
            await visit.go("time")
            await visit.sees("one value every 1.00 s", "main")
            plot = page.locator(".u-over").first
            await plot.wait_for()
            box = await plot.bounding_box()
            assert box is not None
            before = await page.locator(".actions p").first.inner_text()
            await page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 30)
            await page.mouse.down()
            await page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30, steps=4)
            await page.mouse.up()
            whole = page.get_by_role("button", name="Whole span")
            assert await whole.is_enabled()
            assert await page.locator(".actions p").first.inner_text() != before
            await page.keyboard.press("Escape")
            await page.wait_for_timeout(50)
            assert await whole.is_disabled()
            await page.keyboard.press("3")
            await visit.sees("one value every 10.0 s", "main")
            await page.keyboard.press("1")
            await visit.sees("one value every 1.00 s", "main")
            await page.keyboard.press("t")
            assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
            async with page.expect_download() as download:
                await page.get_by_role("button", name="Save CSV").click()
            lines = (await (await download.value).path()).read_text().splitlines()
            assert lines[0].startswith("unix_s,")
            completed = lines[0].split(",").index('"fleet/completed_per_s"')
            assert sum(float(line.split(",")[completed] or 0.0) for line in lines[1:]) == 4.0
            async with page.expect_download() as download:
                await page.get_by_role("button", name="Save PNG").click()
            assert (await (await download.value).path()).read_bytes().startswith(b"\x89PNG")
            await page.keyboard.press("p")
            await visit.sees("Paused at", "#summary")
            await page.keyboard.press("p")
            await visit.sees("Healthy", "#summary")
            await page.keyboard.press("?")
            await visit.sees("find a request", "dialog[open]")
