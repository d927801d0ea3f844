"""A simulated vLLM server without sockets: options, engine, adapters, stored responses and faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_cache import block_hashes
from llmproxy.lab.simulator.engine.kv_store import KvStore
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer
from llmproxy.lab.simulator.engine.profiles import Noise, profile_named
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from llmproxy.lab.simulator.server.answer_text import AnswerText, Join, Numbered, Stopped, Words
from llmproxy.lab.simulator.server.faults import FaultKind, FaultSwitch
from llmproxy.lab.simulator.server.metrics import ReplicaMetrics
from llmproxy.lab.simulator.server.nixl import NixlConnector
from llmproxy.lab.simulator.server.pacer import GenerationJob, Pacer
from llmproxy.lab.simulator.server.requests import ApiError, Body, GenerationRequest, Limits, items, resolve

BLOCK_SIZE = 16
_DEFAULT_MODEL_LEN = 32_768
_STORED_RESPONSES_MAX = 256


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of a replica, named as vLLM's flags. The help of `llmproxy replica` explains the others.

    - `kv_tokens`: None means the size in the profile.
    - `max_model_len`: None means 32768 or the size of the KV cache, whichever is less.
    - `reply_tokens`: (Least, most) tokens after which an answer ends by itself, unless the request sets `ignore_eos`.
    - `sse_keep_alive_s`: Pause in a stream after which an SSE comment is sent.
    - `text`: Pseudo-words, or `numbered` tokens. A prompt with the first part of a numbered answer gets the rest.
    - `join`: Whether a numbered answer that goes on from its text is the `same`, is `split` into other tokens, or
      `repeat`s the last token. An answer that goes on from token ids is always the same.
    - `ragged_deltas`: Whether some tokens come with an empty delta or merged into the next delta.
    - `noise`: Random step times, from `seed`.
    - `requests_kept`: Number of requests that are remembered for tests.
    - `shutdown`: Effect of SIGTERM on open streams of a served replica: cut `now`, `abort` as their finish reason, or
      `hang`. vLLM was seen to do both of the latter.
    - `kv_transfer`: `nixl` (from the replica that a request names) or `store` (through `kv_store`).
    - `kv_lease_s`: How long blocks are kept for another replica.
    - `kv_load_failure_policy`: Whether a request without its KV blocks fails or is computed.
    - `kv_handshake_s`: Additional time of the first transfer between two replicas.
    """

    model: str = "sim"
    adapters: tuple[str, ...] = ()
    profile: str = "llama-8b-h100"
    max_num_seqs: int = 256
    max_loras: int = 4
    max_cpu_loras: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    speed: float = 1.0
    noise: bool = True
    seed: int = 0
    api_key: str | None = None
    reply_tokens: tuple[int, int] = (64, 512)
    prompt_tokens_details: bool = True
    sse_keep_alive_s: float | None = None
    text: Literal["words", "numbered"] = "words"
    join: Join = "same"
    ragged_deltas: bool = False
    requests_kept: int = 1000
    shutdown: Literal["now", "abort", "hang"] = "now"
    kv_transfer: Literal["nixl", "store"] | None = None
    kv_store: Path | None = None
    kv_lease_s: float = 30.0
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_gb_per_s: float = 25.0
    kv_latency_s: float = 0.005
    kv_handshake_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed must be above 0, got {self.speed}")
        if not 1 <= self.reply_tokens[0] <= self.reply_tokens[1]:
            raise ValueError(f"reply_tokens must be (least, most) with 1 <= least <= most, got {self.reply_tokens}")
        if self.model in self.adapters or len(set(self.adapters)) < len(self.adapters):
            raise ValueError(f"the model and its adapters need different names, got {(self.model, *self.adapters)}")
        if self.join != "same" and self.text != "numbered":
            raise ValueError(f"join {self.join} needs numbered text")
        if not self.kv_lease_s > 0 or not self.kv_gb_per_s > 0:
            raise ValueError(f"kv_lease_s and kv_gb_per_s must be above 0, got {self.kv_lease_s}, {self.kv_gb_per_s}")
        if (self.kv_transfer == "store") != (self.kv_store is not None):
            raise ValueError("kv_transfer store needs a kv_store, and nothing else uses one")

    @property
    def kv_times(self) -> KvTransfer:
        """The times of KV transfers, and the policy for failed transfers."""
        return KvTransfer(
            bytes_per_s=self.kv_gb_per_s * 1e9,
            latency_s=self.kv_latency_s,
            handshake_s=self.kv_handshake_s,
            lease_s=self.kv_lease_s,
            on_failure=self.kv_load_failure_policy,
        )


class Service:
    """A server, cold at first. Its engine runs while `pacer.run` runs."""

    def __init__(self, options: ReplicaOptions, faults: FaultSwitch) -> None:
        self.options = options
        self.faults = faults
        self.engine = Engine(
            profile_named(options.profile),
            max_num_seqs=options.max_num_seqs,
            max_loras=options.max_loras,
            max_cpu_loras=options.max_cpu_loras,
            kv_tokens=options.kv_tokens,
            block_size=BLOCK_SIZE,
            step_tokens=options.max_num_batched_tokens,
            noise=Noise() if options.noise else None,
            seed=options.seed,
            store=_store(options),
        )
        room = self.engine.kv_room_tokens
        self.max_model_len = min(_DEFAULT_MODEL_LEN, room) if options.max_model_len is None else options.max_model_len
        if self.max_model_len > room:
            raise ValueError(f"max_model_len {self.max_model_len} does not fit the KV cache of {room} tokens")
        nixl = options.kv_transfer == "nixl"
        self.metrics = ReplicaMetrics(options.model, options.max_loras, self._cache_labels(), nixl)
        self.pacer = Pacer(self.engine, options.speed, self.metrics)
        self.nixl = NixlConnector(self.pacer, options.kv_times, options.speed, faults) if nixl else None
        # The base model, then its adapters -> path.
        self.models = {options.model: options.model} | {name: f"{options.model}/{name}" for name in options.adapters}
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._responses: OrderedDict[str, tuple[Body, list[Any]]] = OrderedDict()

    @property
    def limits(self) -> Limits:
        return Limits(
            self.options.model, frozenset(self.models) - {self.options.model}, self.max_model_len, self.options.join
        )

    @property
    def frontend_s(self) -> float:
        """The seconds between the arrival of a request and its acceptance."""
        return self.engine.profile.frontend_s / self.options.speed

    def fault_changed(self, kind: FaultKind | None) -> None:
        """Applies a fault to the engine, or clears it."""
        self.pacer.freeze(kind in (FaultKind.FROZEN, FaultKind.HANG))
        self.pacer.speed = self.options.speed / (self.faults.factor if kind is FaultKind.SLOW else 1.0)
        self.metrics.lies = kind is FaultKind.LIES
        if kind is FaultKind.ENGINE_DEAD:
            self.pacer.fail(engine_dead())
        if kind is FaultKind.ABORT:
            self.pacer.abort()

    def refuse_if_due(self) -> None:
        """Raises ApiError for a new generation request if a fault refuses it."""
        if self.faults.kind is FaultKind.ENGINE_DEAD:
            raise engine_dead()
        if self.faults.hits(FaultKind.UNAUTHORIZED):
            raise ApiError(401, "Unauthorized", "AuthenticationError")
        if self.faults.hits(FaultKind.RATE_LIMITED):
            raise ApiError(429, "Rate limit exceeded", "RateLimitError")
        if self.faults.hits(FaultKind.ERROR_RATE):
            raise ApiError(500, "out of luck", "InternalServerError")
        if self.faults.hits(FaultKind.DRAINING_500):
            raise ApiError(500, "cannot schedule new futures after shutdown", "InternalServerError")
        if self.faults.hits(FaultKind.BUSY_503):
            self.metrics.rejections += 1
            message = "The engine is currently busy and cannot accept new requests. "
            raise ApiError(503, message + "Please try again later or on a different instance.", "Service Unavailable")

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    def job(self, generation: GenerationRequest, request_id: str, arrived_s: float) -> GenerationJob:
        """Returns the job of a request, with a sequence for each prompt and choice, in the order of their indexes."""
        sequences: list[EngineRequest] = []
        reasons: list[str] = []
        answers: list[AnswerText] = []
        params = generation.kv_transfer_params if self.nixl is not None else {}
        remote = bool(params.get("do_remote_prefill"))
        pins = not remote and bool(params.get("do_remote_decode"))
        alone = len(generation.prompts) * generation.choices == 1
        for tokens in generation.prompts:
            for choice in range(generation.choices):
                answer = self._answer(generation, tokens, choice)
                output_tokens, reason = self._length(generation, answer)
                if reason == "stop":
                    answer.ends_at = output_tokens - 1
                if generation.stops:
                    answer = self._stopped(generation, answer, output_tokens)
                    if answer.stop_reason is not None:
                        output_tokens, reason = answer.length, "stop"
                hashes = block_hashes(
                    (*tokens, *answer.tokens(0, output_tokens)), BLOCK_SIZE, generation.adapter, generation.cache_salt
                )
                name = request_id if alone else f"{len(sequences)}_{request_id}"
                sequences.append(
                    EngineRequest(name, len(tokens), output_tokens, hashes, generation.adapter, pins, remote)
                )
                reasons.append(reason)
                answers.append(answer)
        return GenerationJob(sequences, reasons, generation.stream, arrived_s, params, answers=answers)

    def submit(self, job: GenerationJob) -> None:
        if self.nixl is not None:
            self.nixl.submit(job)
        self.pacer.submit(job)

    def continued(self, body: Body) -> Body:
        """Returns the body of a request to `/v1/responses` with the earlier conversation prepended to the input.

        `previous_response_id` names that conversation. Raises ApiError: 404 for an unknown response or model.
        """
        previous = body.get("previous_response_id")
        if previous is None or not isinstance(body.get("input"), str | list):
            return body
        resolve(body, self.limits)
        self.response(previous)
        return body | {"input": [*self._responses[previous][1], *items(body["input"])]}

    def keep_response(self, response_id: str, body: Body, conversation: list[Any]) -> None:
        """Stores a response and its conversation. Beyond a limit, the oldest response is dropped."""
        self._responses[response_id] = body, conversation
        if len(self._responses) > _STORED_RESPONSES_MAX:
            self._responses.popitem(last=False)

    def response(self, response_id: str) -> Body:
        """Returns the body of a stored response. Raises ApiError (404) for an unknown id."""
        try:
            return self._responses[response_id][0]
        except KeyError:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, message, "invalid_request_error", "response_id") from None

    def _answer(self, generation: GenerationRequest, prompt: tuple[int, ...], choice: int) -> AnswerText:
        if self.options.text == "numbered":
            return Numbered(prompt, generation.model, choice, generation.join)
        return Words(prompt, generation.model, choice)

    @staticmethod
    def _stopped(generation: GenerationRequest, answer: AnswerText, output_tokens: int) -> Stopped:
        included = generation.body.get("include_stop_str_in_output") is True
        return Stopped(answer, output_tokens, generation.stops, included, generation.min_tokens)

    def _length(self, generation: GenerationRequest, answer: AnswerText) -> tuple[int, str]:
        """Returns the number of output tokens, and the reason of the end."""
        least, most = self.options.reply_tokens
        natural = max(least + answer.seed % (most - least + 1) - answer.done, generation.min_tokens, 1)
        if generation.ignore_eos or natural >= generation.max_tokens:
            return generation.max_tokens, "length"
        return natural, "stop"

    def _cache_labels(self) -> dict[str, str]:
        return {
            "block_size": str(BLOCK_SIZE),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "kv_cache_memory_bytes": "None",
            "kv_cache_size_tokens": str(self.engine.kv_blocks * BLOCK_SIZE),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(self.engine.kv_blocks),
            "num_gpu_blocks_override": "None",
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
        }


def _store(options: ReplicaOptions) -> tuple[KvStore, KvTransfer] | None:
    if options.kv_store is None:
        return None
    options.kv_store.mkdir(parents=True, exist_ok=True)
    return KvStore(options.kv_store / "blocks"), options.kv_times


def engine_dead() -> ApiError:
    """Returns the error for requests after the engine has died."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return ApiError(500, message, "InternalServerError")
