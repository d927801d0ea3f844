"""Transfers of a prompt's KV from the prefill engine to the decode engine: times and parameters.

Fields and rules follow vLLM's NixlConnector, in which the decode engine pulls. The defaults of `KvTransfer` are for
Llama-8B over a network of 200 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """The times of a transfer, and the policy for failed transfers.

    A transfer takes `latency_s` plus its bytes divided by `bytes_per_s`; the first between two engines also takes
    `handshake_s`. The prefill engine keeps the blocks for `lease_s`, and the decode engine's heartbeats extend this
    time while its request waits. If the blocks are not available, the decode engine computes the prompt (`recompute`)
    or fails the request. A lost engine is noticed after `lost_s` if the two engines were connected before, else after
    `unreachable_s`.
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
        return self.latency_s + self.bytes_of(tokens) / self.bytes_per_s

    @property
    def heartbeat_s(self) -> float:
        """The interval of heartbeats for a waiting request."""
        return self.lease_s / 6

    @property
    def extension_s(self) -> float:
        """The time by which a heartbeat extends the lease of the blocks."""
        return self.lease_s * 2 / 3


class MalformedParamsError(Exception):
    """`kv_transfer_params` that crash a real engine."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    """vLLM's `kv_transfer_params`, from the response of the prefill engine and in the request to the decode engine."""

    remote_block_ids: tuple[tuple[int, ...], ...]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """Returns the fields in the order of vLLM 0.32."""
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
        """Reads the fields. Raises MalformedParamsError for a wrong type, or if a field of all versions is missing."""
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
