"""The simulated fleet of a replay: its replicas, and their faults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from llmproxy.core.domain import Role
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer
from llmproxy.lab.simulator.engine.profiles import Profile

STEP_TOKENS = 8_192
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 131_072
KV_TRANSFER = KvTransfer()


class FleetFaultKind(StrEnum):
    """A fault of a replica. All but `kill`, `restart` and `roll` end at `until_s`.

    `kill`: the process dies, connections break and polls are refused, until a `restart` if there is one.
    `restart`: the process dies (if it lives) and serves again, with cold caches, `value` seconds later.
    `roll`: the server drains and then restarts in the same way, as in a rollout.
    `hang`: the server accepts requests and polls but answers neither; its engine does not advance.
    `slow`: every step takes `value` times as long.
    `reset`: each answer is cut in mid-stream with probability `value`.
    `metric_age`: metrics are `value` seconds old when they arrive, with a fresh timestamp.
    `lost_readings`: each scrape fails with probability `value`.
    `lost_kv_events`: each batch of KV events is lost with probability `value`.
    """

    KILL = "kill"
    RESTART = "restart"
    ROLL = "roll"
    HANG = "hang"
    SLOW = "slow"
    RESET = "reset"
    METRIC_AGE = "metric_age"
    LOST_READINGS = "lost_readings"
    LOST_KV_EVENTS = "lost_kv_events"


@dataclass(frozen=True, slots=True)
class Fault:
    """An entry of the timeline. `replica` is None for a fault of all replicas."""

    at_s: float
    kind: FleetFaultKind
    replica: str | None = None
    until_s: float | None = None
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A simulated vLLM server. It starts `joins_s` seconds into the replay."""

    name: str
    profile_name: str
    profile: Profile
    kv_tokens: int
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = MAX_NUM_SEQS
    step_tokens: int = STEP_TOKENS
    async_scheduling: bool = True
    block_size: int = 16
    max_loras: int = 8
    max_cpu_loras: int = 32
    joins_s: float = 0.0
    role: Role = Role.BOTH


@dataclass(frozen=True, slots=True)
class Autoscale:
    """The autoscaler of a fleet. It never starts more than the fleet's replicas."""

    # A name of `lab.scaling.signals.SIGNALS`.
    policy: str
    # The minimum number of replicas.
    min: int = 1
    # Time until a new replica serves.
    start_s: float = 120.0
    # Interval between two decisions of the autoscaler.
    ask_s: float = 15.0


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Replicas, their faults, their autoscaler and KV transfer times, and the proxies in front of them."""

    name: str
    # Replicas with distinct names. All replicas serve, unless the fleet has an autoscaler.
    replicas: tuple[ReplicaSpec, ...]
    # The faults of replicas, in the order of their begins.
    faults: tuple[Fault, ...] = ()
    # Number of proxies. Each knows only its own requests.
    proxies: int = 1
    autoscale: Autoscale | None = None
    # Durations of KV transfers between replicas with roles.
    kv_transfer: KvTransfer = KV_TRANSFER

    @property
    def split_up(self) -> bool:
        """Whether any replica serves only prefill or only decode."""
        return any(spec.role is not Role.BOTH for spec in self.replicas)
