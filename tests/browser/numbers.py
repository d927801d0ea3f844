"""`make numbers`: compares the page, `/metrics` and the measurements of a client over a minute.

Requests of three flows in two bands come for a good minute at random moments to a proxy over two simulated replicas.
Then the page is paused, and read. It fails if two of the numbers differ by more than `APART_MAX`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
from playwright.async_api import Page, Response, async_playwright
from prometheus_client.parser import text_string_to_metric_families

from llmproxy.lab.simulator.replica import Replica, ReplicaOptions
from tests.compat.browser import found_browser
from tests.e2e.processes import served
from tests.e2e.proxies import CHAT

APART_MAX = 0.05
SPAN_S = 60
LASTS_S = 70.0
PER_S = 7.0
REPLICA = ReplicaOptions(model="base", max_num_seqs=4)
FLOWS = (("acme", "critical"), ("acme", "default"), ("globex", "default"))
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "%": 0.01}

Totals = Mapping[tuple[str, str], float]
"""Sums of a metric, by its name and the labels that are compared."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as its client saw it; `ended_s` is on the monotonic clock, which all processes share."""

    ended_s: float
    band: str
    flow: str
    backend: str
    ttft_s: float
    prompt: int
    cached: int
    output: int


async def ask(http: aiohttp.ClientSession, random: Random, number: int, seen: list[Seen]) -> None:
    flow, band = random.choice(FLOWS)
    words = f"{number} " + " ".join(random.choice(("apple", "bicycle", "cloud")) for _ in range(1_500))
    messages = [{"role": "system", "content": "You sell bicycles. " * 200}, {"role": "user", "content": words}]
    body = {"model": "base", "max_tokens": random.randint(8, 80), "stream": True, "messages": messages}
    headers = {"x-llm-d-inference-objective": band, "x-llm-d-inference-fairness-id": flow}
    began, first = time.monotonic(), None
    body["stream_options"] = {"include_usage": True}
    async with http.post(CHAT, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        text = b""
        async for chunk in answer.content.iter_any():
            first = first or time.monotonic()
            text += chunk
    usage = next(json.loads(line[6:])["usage"] for line in reversed(text.splitlines()) if b'"usage":{' in line)
    assert first is not None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    seen.append(
        Seen(time.monotonic(), band, flow, answer.headers["x-llmproxy-backend"], first - began,
             usage["prompt_tokens"], cached, usage["completion_tokens"])
    )  # fmt: skip


async def load(http: aiohttp.ClientSession, seen: list[Seen]) -> None:
    """Requests at random moments, until cancelled."""
    random, number = Random(1), 0
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(random.expovariate(PER_S))
            number += 1
            group.create_task(ask(http, random, number, seen))


async def scrape(http: aiohttp.ClientSession, found: dict[int, Totals]) -> None:
    """`/metrics` at each full second, until cancelled."""
    while True:
        now = time.monotonic()
        await asyncio.sleep(1.0 - now % 1.0)
        async with http.get("/metrics") as page:
            text = await page.text()
        totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                for label in ("outcome", "direction"):
                    if label in one.labels:
                        totals[one.name, one.labels[label]] += one.value
                if one.name == "llmproxy_time_to_first_token_seconds_bucket":
                    totals[one.labels["band"], one.labels["le"]] += one.value
        found[round(now // 1.0) + 1] = totals


def read(text: str) -> float:
    """A number as the page writes it."""
    found = re.match(r"([\d,.]+)\s*(ms|s|min|%)?", text)
    assert found, text
    return float(found[1].replace(",", "")) * UNITS.get(found[2] or "", 1.0)


async def cells(page: Page, view: str, row: str) -> dict[str, str]:
    """The cells of the row that has all these words, by the titles of their columns."""
    await page.evaluate(f"location.hash = '#{view}'")
    table = page.locator("main table:not(.legend)").first
    await table.wait_for()
    titles = [title.strip("▲▼ ") for title in await table.locator("thead th").all_inner_texts()]
    for one in await table.locator("tbody tr").all():
        texts = await one.locator("th, td").all_inner_texts()
        if all(word in texts for word in row.split()):
            return dict(zip(titles, texts, strict=True))
    raise AssertionError(f"{view} has no row of {row}")


async def page_numbers(page: Page) -> dict[str, float]:
    """The numbers on the paused page."""
    tiles = {
        await one.locator("dt").inner_text(): await one.locator("dd").all_inner_texts()
        for one in await page.locator(".tile").all()
    }
    found = {
        "completed": read(tiles["Requests/s"][1].partition("; ")[2]),
        "output tokens/s": read(tiles["Output tokens/s"][0]),
        "input tokens/s": read(tiles["Output tokens/s"][1]),
        "cache hits": read(tiles["Cache hits"][0]),
    }
    for band in ("critical", "default"):
        for fact in await page.locator(f".band[data-band={band}] .facts div").all():
            title, value = (await fact.inner_text()).split("\n")[:2]
            if title.startswith("TTFT"):
                found[f"{title} of {band}"] = read(value)
    for name in ("b0", "b1"):
        found[f"tokens/s of {name}"] = read((await cells(page, "replicas", name))["Tokens/s"])
    for flow, band in FLOWS:
        found[f"tokens/s of {flow}, {band}"] = read((await cells(page, "flows", f"{flow} {band}"))["Tokens/s"])
    return found


def of_client(seen: Iterable[Seen]) -> dict[str, float]:
    some = list(seen)
    found = {
        "completed": float(len(some)),
        "output tokens/s": sum(one.output for one in some) / SPAN_S,
        "input tokens/s": sum(one.prompt for one in some) / SPAN_S,
        "cache hits": sum(one.cached for one in some) / sum(one.prompt for one in some),
    }
    for band in ("critical", "default"):
        times = sorted(one.ttft_s for one in some if one.band == band)
        for percent in (50, 99):
            # The time of a request, as on the page, not an interpolated time.
            found[f"TTFT p{percent} of {band}"] = times[ceil(percent / 100 * len(times)) - 1]
    for name in ("b0", "b1"):
        found[f"tokens/s of {name}"] = sum(one.output for one in some if one.backend == name) / SPAN_S
    for flow, band in FLOWS:
        mine = [one for one in some if (one.flow, one.band) == (flow, band)]
        found[f"tokens/s of {flow}, {band}"] = sum(one.prompt + one.output for one in mine) / SPAN_S
    return found


def of_metrics(before: Totals, after: Totals) -> dict[str, float]:
    def more(name: str, label: str) -> float:
        return after[name, label] - before.get((name, label), 0.0)

    tokens = {one: more("llmproxy_tokens_total", one) for one in ("input", "output", "cached")}
    return {
        "completed": more("llmproxy_requests_total", "completed"),
        "output tokens/s": tokens["output"] / SPAN_S,
        "input tokens/s": tokens["input"] / SPAN_S,
        "cache hits": tokens["cached"] / tokens["input"],
    }


def bucket(before: Totals, after: Totals, band: str, share: float) -> tuple[float, float]:
    """The bounds of the bucket of the histogram in which this percentile is."""
    ends = sorted(
        (float(le), value - before.get((name, le), 0.0)) for (name, le), value in after.items() if name == band
    )
    low = 0.0
    for end, count in ends:
        if count >= share * ends[-1][1]:
            return low, end
        low = end
    raise AssertionError("a histogram without a last bucket")


async def main() -> int:
    if found_browser() is None:
        print("skipped: no browser is installed")
        return 0
    seen: list[Seen] = []
    scraped: dict[int, Totals] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        replicas = [await stack.enter_async_context(Replica(REPLICA)) for _ in range(2)]
        backends = [{"name": f"b{i}", "url": one.url} for i, one in enumerate(replicas)]
        (folder / "llmproxy.json").write_text(json.dumps({"port": 0, "backends": backends}))
        proxy = await stack.enter_async_context(served(folder / "log", "--config", str(folder / "llmproxy.json")))
        url = await proxy.url()
        http = await stack.enter_async_context(aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)))
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=found_browser(), args=["--no-sandbox"])
        page = await browser.new_page()
        lives: list[Response] = []
        page.on("response", lambda one: lives.append(one) if "/debug/live" in one.url and one.status == 200 else None)
        await page.goto(f"{url}/ui#now")
        work = [asyncio.create_task(load(http, seen)), asyncio.create_task(scrape(http, scraped))]
        await asyncio.wait(work, timeout=LASTS_S, return_when=asyncio.FIRST_EXCEPTION)
        await page.keyboard.press("p")
        await asyncio.sleep(1.0)
        last = int((await lives[-1].json())["second"]) + 1
        on_page = await page_numbers(page)
        await browser.close()
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    return compared(on_page, seen, scraped[last - SPAN_S], scraped[last], last)


def compared(on_page: dict[str, float], seen: Sequence[Seen], before: Totals, after: Totals, last: int) -> int:
    by_client = of_client(one for one in seen if last - SPAN_S < one.ended_s <= last)
    by_metrics = of_metrics(before, after)
    wrong = 0
    print(f"| {'of the last minute':30} | page | /metrics | client | furthest apart |\n| --- | --: | --: | --: | --: |")
    for name, shown in on_page.items():
        others = [one[name] for one in (by_metrics, by_client) if name in one]
        apart = max(abs(shown / other - 1.0) for other in others)
        metric = f"{by_metrics[name]:,.3f}" if name in by_metrics else "–"
        if name.startswith("TTFT"):
            low, high = bucket(before, after, name.partition(" of ")[2], 0.5 if "p50" in name else 0.99)
            metric = f"{low:g} to {high:g}"
            wrong += not low * (1.0 - APART_MAX) <= shown <= high * (1.0 + APART_MAX)
        wrong += apart > APART_MAX
        print(f"| {name:30} | {shown:,.3f} | {metric} | {by_client[name]:,.3f} | {apart:.1%} |")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
