"""What real vLLM replicas find in their prefix caches when conversations come through the proxy.

    python -m benchmarks.validation.chat --backend http://127.0.0.1:18001 --backend http://127.0.0.1:18002

The same conversations, a shared system prompt and a few turns each, several at a time, go to the replicas three times:
by placement `cost`, by `round_robin`, and to the first replica alone, which is what no placement can beat. Caches are
emptied before each (the replicas need VLLM_SERVER_DEV_MODE=1 and --enable-prompt-tokens-details). It prints the
hits by the engines' own counters, and for `cost` what the proxy expected of each prompt against `cached_tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.validation.vllm_replica import Replica, proxied
from llmproxy.observe import logs

WORDS = ("red", "blue", "house", "tree", "river", "stone", "runs", "sings", "slowly", "under", "seven", "lamps", "and")


@dataclass(frozen=True, slots=True)
class Talk:
    """How many conversations, how many at a time, and how long."""

    conversations: int
    at_a_time: int
    turns: int
    system_words: int
    turn_words: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class CacheHits:
    """Of one pass: prompt tokens that the engines looked up and found, and the lines of the decision log."""

    queries: int
    hits: int
    lines: list[dict[str, Any]]


async def measure(backends: Sequence[str], placement: str, talk: Talk) -> CacheHits:
    """Hold all conversations through a proxy of its own over `backends`."""
    async with aiohttp.ClientSession() as http:
        replicas = [Replica(url, http) for url in backends]
        for replica in replicas:
            await replica.forget()
        before = [await replica.counters() for replica in replicas]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "decisions.jsonl"
            scheduling = {"placement": placement, "seed": 1}
            async with proxied(backends, decision_log=str(log), scheduling=scheduling) as proxy:
                turn = asyncio.Semaphore(talk.at_a_time)
                await asyncio.gather(
                    *(_converse(http, proxy.url, talk, number, turn) for number in range(talk.conversations))
                )
            lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
        after = [await replica.counters() for replica in replicas]
    gained = {
        name: sum(new[name] - old[name] for new, old in zip(after, before, strict=True))
        for name in ("prefix_queries", "prefix_hits")
    }
    return CacheHits(gained["prefix_queries"], gained["prefix_hits"], [line for line in lines if "outcome" in line])


async def _converse(http: aiohttp.ClientSession, url: str, talk: Talk, number: int, turn: asyncio.Semaphore) -> None:
    shared, own = random.Random(0), random.Random(number + 1)
    messages = [{"role": "system", "content": " ".join(shared.choices(WORDS, k=talk.system_words))}]
    for _ in range(talk.turns):
        messages.append({"role": "user", "content": f"{number} " + " ".join(own.choices(WORDS, k=talk.turn_words))})
        body = {"messages": messages, "max_tokens": talk.answer_tokens, "ignore_eos": True, "temperature": 0.0}
        # Turns of a conversation lie apart, so that others come between them.
        async with turn, http.post(f"{url}/v1/chat/completions", json=body | {"stream": True}) as response:
            response.raise_for_status()
            messages.append({"role": "assistant", "content": _text(await response.read())})


def _text(stream: bytes) -> str:
    events = [orjson.loads(line.removeprefix(b"data: ")) for line in stream.splitlines() if line.startswith(b"data: {")]
    if failed := [event for event in events if "error" in event]:
        raise SystemExit(f"a replica broke off: {failed[0]}")
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def report(name: str, cache: CacheHits) -> None:
    """One line on the hits, and one on what was expected."""
    print(
        f"{name:22s} {cache.hits:7,} of {cache.queries:7,} prompt tokens found in the cache:"
        f" {cache.hits / cache.queries:.3f}"
    )
    known = [(line["predicted"]["cached_tokens"], line["cached_tokens"], line["prompt_tokens"]) for line in cache.lines
             if line.get("predicted") and line.get("cached_tokens") is not None]  # fmt: skip
    if known:
        expected, real, prompts = (sum(column) for column in zip(*known, strict=True))
        off = sum(abs(one - other) for one, other, _ in known)
        print(f"{'':22s} expected {expected:,}, real {real:,} of {prompts:,}; off by {off / prompts:.3f} of a prompt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", required=True, metavar="URL")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    logs.configure("text", "error")
    talk = Talk(given.conversations, 6, given.turns, system_words=40, turn_words=80, answer_tokens=24)
    for name, placement, backends in (
        ("cost", "cost", given.backend),
        ("round_robin", "round_robin", given.backend),
        ("one replica alone", "cost", given.backend[:1]),
    ):
        report(name, asyncio.run(measure(backends, placement, talk)))


if __name__ == "__main__":
    main()
