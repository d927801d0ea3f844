"""How the KV of a prompt goes from the engine that computed it to the one that answers: times, and what the two say.

The fields and the rules are those of vLLM's NixlConnector, which pulls. The numbers of a `KvTransfer` are for Llama-8B
over a network of 200 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """A transfer of `tokens` takes `latency_s` and their bytes through `bytes_per_s`; the first one between two engines
    takes `handshake_s` more.

    Blocks are kept for `lease_s` after the prefill; the other engine extends that while its request waits. A request
    whose KV cannot be had is computed (`recompute`) or fails. A known peer that is gone is noticed after `lost_s`, an
    unknown one after `unreachable_s`.
    """

    bytes_per_token: int = 131_072
    bytes_per_s: float = 25e9
    latency_s: float = 0.005
    handshake_s: float = 0.5
    lease_s: float = 30.0
    on_failure: Literal["fail", "recompute"] = "fail"
    lost_s: float = 0.1
    unreachable_s: float = 5.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_token > 0 and self.bytes_per_s > 0 and self.lease_s > 0):
            raise ValueError("bytes_per_token, bytes_per_s and lease_s must be above 0")

    def bytes_of(self, tokens: int) -> int:
        return tokens * self.bytes_per_token

    def transfer_s(self, tokens: int) -> float:
        """Seconds that the KV of so many tokens takes."""
        return self.latency_s + self.bytes_of(tokens) / self.bytes_per_s

    @property
    def heartbeat_s(self) -> float:
        """The time between two words that a request still waits for its KV."""
        return self.lease_s / 6

    @property
    def extension_s(self) -> float:
        """How long such a word keeps the blocks."""
        return self.lease_s * 2 / 3


class MalformedParamsError(Exception):
    """The engine dies of them."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a prefill is answered with, and what the request that continues it brings: vLLM's `kv_transfer_params`."""

    remote_block_ids: tuple[tuple[int, ...], ...]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """In the order in which vLLM 0.32 writes them."""
        own = asdict(self)
        tail = ("remote_num_tokens", "remote_prefill_cached_tokens")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **{name: value for name, value in own.items() if name not in tail},
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.remote_num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": self.remote_prefill_cached_tokens,
        }

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> TransferParams:
        """Raises MalformedParamsError where one is missing that every version sent, or is of another type."""
        try:
            blocks = tuple(tuple(map(int, group)) for group in body["remote_block_ids"])
            named = {name: str(body[name]) for name in ("remote_engine_id", "remote_request_id", "remote_host")}
            port = int(body["remote_port"]) if int(body["tp_size"]) > 0 else 0
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedParamsError(repr(error)) from None
        cached, tokens = (body.get(name) for name in ("remote_prefill_cached_tokens", "remote_num_tokens"))
        return cls(
            blocks, **named, remote_port=port, remote_num_tokens=tokens or 0, remote_prefill_cached_tokens=cached or 0
        )
