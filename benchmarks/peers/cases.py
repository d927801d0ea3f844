"""The loads: how many clients, which prompts, and how fast the answers come."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

NUMBER = "#" * 16  # The load generator replaces this text by a unique number.
CHUNKS = "@" * 5  # The load generator replaces this text by the number of chunks.
GROUPS = 8  # The number of flows. Each flow has its own system prompt.
OBJECTIVES = ("critical", "default", "default", "sheddable")

_WORDS = str.split(
    "the engine answers each request with tokens from a model that was loaded before and keeps all it has read in its "
    "cache so that the next prompt with the same beginning is cheaper while others wait for their turn in the queue"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load, with its clients and requests."""

    name: str
    title: str
    clients: int
    prompt_bytes: int = 800
    shared_bytes: int = 400
    """How many bytes of the prompt are equal in all requests of a flow. The other bytes are unique."""
    chunks: int = 0
    """The number of chunks of a stream; 0 for an answer without a stream."""
    gap_us: int = 0
    rate: float = 0.0
    """The requests per second of an open loop with at most `clients` at once; 0 for a closed loop."""
    ramp_s: float = 0.2
    warmup_s: float = 0.5
    saturating: bool = False
    """Whether the load needs more than a core, so that throughput is a figure."""
    fresh: bool = False
    """Whether the proxies are started anew, so that their memory does not come from earlier cases."""

    def requests(self, folder: Path) -> list[Path]:
        """Writes the requests for the load generator. Returns the files: each flow has a separate file."""
        files = []
        for group in range(GROUPS):
            body = self._body(group).encode()
            objective = OBJECTIVES[group % len(OBJECTIVES)]
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: loadgen\r\naccept: */*\r\n"
                "authorization: Bearer sk-benchmark\r\ncontent-type: application/json\r\n"
                f"x-llm-d-inference-fairness-id: client-{group}\r\nx-llm-d-inference-objective: {objective}\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            files.append(folder / f"{self.name}-{group}.http")
            files[-1].write_bytes(head.encode() + body)
        return files

    def _body(self, group: int) -> str:
        shared = _text(self.shared_bytes, seed=group)
        own = f"{NUMBER} {_text(self.prompt_bytes - self.shared_bytes, seed=-1)}"
        system = [{"role": "system", "content": shared}] if shared else []
        messages = [*system, {"role": "user", "content": own}]
        ask: dict[str, object] = {"model": "mock", "messages": messages, "temperature": 0.7}
        if self.chunks:
            ask |= {"stream": True, "max_tokens": CHUNKS, "seed": self.gap_us}
        return json.dumps(ask).replace(f'"{CHUNKS}"', CHUNKS)

    def load_argv(self, port: int, seconds: float) -> list[str]:
        """Returns the flags for the load generator."""
        flags = {"p": port, "c": self.clients, "n": self.chunks, "r": self.rate, "a": self.ramp_s, "w": self.warmup_s}
        return [word for name, value in {**flags, "s": seconds}.items() for word in (f"-{name}", str(value))]


def _text(size: int, seed: int) -> str:
    """Returns `size` bytes of words in an order that depends on `seed`."""
    choose = random.Random(seed)
    words = " ".join(choose.choices(_WORDS, k=size // 2 + 1)) if size > 0 else ""
    return words[: max(0, size)]


STREAMS = partial(Case, chunks=100)
PROMPTS = partial(Case, shared_bytes=0, saturating=True)
MIXED = partial(Case, clients=256, prompt_bytes=8_000, shared_bytes=6_000, chunks=200, ramp_s=0.5)
CASES = (
    Case(name="json64", title="JSON answers, 64 connections, closed loop", clients=64, saturating=True),
    Case(name="json200", title="JSON answers, 200 requests/s, open loop", clients=64, rate=200.0),
    STREAMS(name="sse64", title="64 streams of 100 chunks, 10 ms apart", clients=64, gap_us=10_000),
    STREAMS(name="sse256", title="256 streams of 100 chunks, 20 ms apart", clients=256, gap_us=20_000),
    STREAMS(name="sse1000", title="1,000 streams of 100 chunks, 50 ms apart", clients=1000, gap_us=50_000, ramp_s=1.0),
    STREAMS(
        name="slow4000",
        title="4,000 streams of 100 chunks, 250 ms apart",
        clients=4000,
        gap_us=250_000,
        ramp_s=4.0,
        warmup_s=1.0,
        fresh=True,
    ),
    Case(
        name="burst64", title="64 streams of 200 chunks, as fast as possible", clients=64, chunks=200, saturating=True
    ),
    PROMPTS(name="body8k", title="prompts of 8 KB, 32 connections, closed loop", clients=32, prompt_bytes=8_000),
    PROMPTS(name="body128k", title="prompts of 128 KB, 16 connections, closed loop", clients=16, prompt_bytes=128_000),
    PROMPTS(name="body10m", title="prompts of 10 MB, 4 connections, closed loop", clients=4, prompt_bytes=10_000_000),
    PROMPTS(
        name="big100",
        title="prompts of 10 MB, 100 connections, closed loop",
        clients=100,
        prompt_bytes=10_000_000,
        ramp_s=0.5,
        warmup_s=3.0,
        fresh=True,
    ),
    MIXED(
        name="mix", title="256 streams of 200 chunks, 10 ms apart, prompts of 8 KB, 6 KB of it shared", gap_us=10_000
    ),
    MIXED(name="mixfull", title="the same, 3 ms apart: more than a core can carry", gap_us=3_000, saturating=True),
)
