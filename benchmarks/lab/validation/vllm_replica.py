"""A client of a real vLLM replica. It reads settings, counters and gauges, and gets answers as token ids.

The replica needs vLLM's developer mode (VLLM_SERVER_DEV_MODE=1). Only in this mode it shows its settings, empties its
prefix cache, and pauses while a burst queues in a known order.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

READY_S = 60.0
SLOW_STEPS = "benchmarks.lab.validation.slow_steps:SlowSteps"
# A few of those steps.
_PULSE_S = 0.02
_COUNTERS = {
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "prompt": "vllm:prompt_tokens_total",
    "generation": "vllm:generation_tokens_total",
    "token_steps": "vllm:iteration_tokens_total_count",
}
_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:lora_requests_info",
)


class UnfitError(Exception):
    """A replica cannot be compared with the engine model. The text has the remedy."""


@dataclass(frozen=True, slots=True)
class ListedRequest:
    """A request of the list.

    `salt` is vLLM's cache_salt. `adapter` is None for the base model. `after` names an earlier request whose prompt and
    answer precede `prompt`, as in the next request of a conversation.
    """

    name: str
    prompt: tuple[int, ...]
    answer_tokens: int
    adapter: str | None = None
    salt: str | None = None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The token ids of a prompt and of its answer, and the number of cached prompt tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True, order=True)
class State:
    """The gauges of a replica at one moment.

    `deferred` counts waiting requests whose adapter does not fit the batch.
    """

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a replica that affect the rules of its scheduler."""

    model: str
    blocks: int
    block_size: int
    max_num_seqs: int
    step_tokens: int
    max_loras: int
    max_cpu_loras: int
    context_tokens: int


class Replica:
    """A real vLLM replica at `url`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def settings(self) -> Settings:
        """Reads the settings of the replica. Raises UnfitError if it cannot be compared with the engine model."""
        url = f"{self.url}/server_info"
        async with self._session.get(url, params={"config_format": "json"}) as answer:
            if answer.status != 200:
                raise UnfitError(f"{url} answered {answer.status}; start the replica with VLLM_SERVER_DEV_MODE=1")
            config = (await answer.json())["vllm_config"]
        scheduler, cache, lora = config["scheduler_config"], config["cache_config"], config["lora_config"]
        slowed = SLOW_STEPS in (config["model_config"]["logits_processors"] or ())
        wanted = [
            ("slow steps", slowed, True, f"--logits-processors {SLOW_STEPS}"),
            ("async_scheduling", scheduler["async_scheduling"], False, "--no-async-scheduling"),
            ("policy", scheduler["policy"], "fcfs", "--scheduling-policy fcfs"),
            ("enable_chunked_prefill", scheduler["enable_chunked_prefill"], True, "--enable-chunked-prefill"),
            ("watermark", scheduler["watermark"], 0.0, "--watermark 0"),
            ("enable_prefix_caching", cache["enable_prefix_caching"], True, "--enable-prefix-caching"),
            ("max_loras", lora and lora["max_loras"], 1, "--enable-lora --max-loras 1"),
        ]
        for name, got, want, flag in wanted:
            if got != want:
                raise UnfitError(f"{self.url} has {name}={got!r}, the comparison needs {want!r}; start it with {flag}")
        async with self._session.get(f"{self.url}/v1/models") as answer:
            model: str = (await answer.json())["data"][0]["id"]
        return Settings(
            model=model,
            blocks=cache["num_gpu_blocks"],
            block_size=cache["block_size"],
            max_num_seqs=scheduler["max_num_seqs"],
            step_tokens=scheduler["max_num_batched_tokens"],
            max_loras=lora["max_loras"],
            max_cpu_loras=lora["max_cpu_loras"],
            context_tokens=config["model_config"]["max_model_len"],
        )

    async def forget(self) -> None:
        """Empties the prefix cache."""
        if not (await self._post("reset_prefix_cache"))["success"]:
            raise UnfitError(f"{self.url} did not empty its prefix cache: another client uses it")

    async def counters(self) -> dict[str, int]:
        """Returns the counters of the replica, named as in the engine model.

        `token_steps` counts the steps that produced a token.
        """
        page = await self._scrape(_COUNTERS.values())
        return {name: int(_values(page, series)[0]) for name, series in _COUNTERS.items()}

    async def send(self, model: str, request: ListedRequest, prompt: Sequence[int]) -> aiohttp.ClientResponse:
        """Sends a request, and returns when it is in the engine's queue."""
        body = {
            "model": request.adapter or model,
            "prompt": list(prompt),
            "max_tokens": request.answer_tokens,
            "min_tokens": request.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if request.salt is not None:
            body["cache_salt"] = request.salt
        response = await self._session.post(f"{self.url}/v1/completions", json=body)
        if response.status != 200:
            raise UnfitError(f"{self.url} refused {request.name!r}: {response.status} {(await response.text())[:300]}")
        return response

    async def read(self, request: ListedRequest, prompt: Sequence[int], response: aiohttp.ClientResponse) -> Answer:
        """Waits for the whole answer to a request, and returns it."""
        tokens: list[int] = []
        usage = None
        async with response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise UnfitError(f"{self.url} broke off {request.name!r}: {event['error']}")
                for choice in event["choices"]:
                    tokens += choice["token_ids"] or ()
                usage = event.get("usage") or usage
        if usage is None or usage["prompt_tokens_details"] is None:
            raise UnfitError(f"{self.url} reports no cached_tokens; start it with --enable-prompt-tokens-details")
        if len(tokens) != request.answer_tokens:
            raise UnfitError(
                f"{self.url} answered {request.name!r} with {len(tokens)} tokens, not {request.answer_tokens}"
            )
        return Answer(tuple(prompt), tuple(tokens), usage["prompt_tokens_details"]["cached_tokens"])

    async def hold(self) -> None:
        """Pauses the engine between two steps. New requests queue meanwhile."""
        await self._post("pause", mode="keep", clear_cache="false")

    async def go_on(self) -> None:
        """Lets the engine run again after `hold`."""
        await self._post("resume")

    async def pulse(self) -> None:
        """Lets a paused engine run a few steps."""
        await self.go_on()
        await asyncio.sleep(_PULSE_S)
        await self.hold()

    async def state(self) -> State:
        """Reads the gauges of the replica."""
        page = await self._scrape(_GAUGES)
        (running,), (waiting,) = _values(page, _GAUGES[0]), _values(page, _GAUGES[1])
        (deferred,) = _values(page, _GAUGES[2], 'reason="deferred"')
        return State(int(running), int(waiting), int(deferred), _adapters(page) if running else ())

    async def _scrape(self, names: Iterable[str]) -> str:
        async with self._session.get(f"{self.url}/metrics/", params=[("name[]", name) for name in names]) as answer:
            return await answer.text()

    async def _post(self, path: str, **params: str) -> dict[str, Any]:
        async with self._session.post(f"{self.url}/{path}", params=params) as answer:
            if answer.status != 200:
                raise UnfitError(
                    f"{self.url}/{path} answered {answer.status}; start the replica with VLLM_SERVER_DEV_MODE=1"
                )
            said: dict[str, Any] = await answer.json()
            return said


def _values(page: str, series: str, label: str = "") -> list[float]:
    return [float(v) for v in re.findall(rf"^{series}\{{[^}}]*{label}[^}}]*\}} (\S+)$", page, re.MULTILINE)]


def _adapters(page: str) -> tuple[str, ...]:
    """Returns the adapters of the newest series.

    vLLM removes no series, and the value of a series is the time when it was set.
    """
    found = re.findall(r'^vllm:lora_requests_info\{.*running_lora_adapters="([^"]*)".*\} (\S+)$', page, re.MULTILINE)
    newest = max(found, key=lambda series: float(series[1]), default=("", ""))[0]
    return tuple(sorted(name for name in newest.split(",") if name))
