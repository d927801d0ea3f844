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

    `kill`: the process dies, connections break and polls are refused; for good, or until a `restart`.
    `restart`: the process dies (if it lives) and serves again, caches cold, `value` seconds later.
    `roll`: it takes nothing new and says so, ends the answers under way, and then restarts as above: a rollout.
    `hang`: it accepts requests and polls and answers neither; its engine stands still.
    `slow`: every step takes `value` times as long.
    `reset`: each answer that starts is cut in mid-stream with probability `value`.
    `metric_age`: readings are `value` seconds old when they arrive, and do not say so.
    `lost_readings`: each poll of the metrics fails with probability `value`.
    `lost_kv_events`: each batch of KV events fails to reach a subscriber with probability `value`, and never comes.
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
    """One entry of the timeline: `replica` is a name of the fleet, or None for all of them."""

    at_s: float
    kind: FleetFaultKind
    replica: str | None = None
    until_s: float | None = None
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One simulated vLLM server. It is there from the start, or serves first `joins_s` seconds into the replay."""

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
    """How a fleet scales: which signal it follows (`lab.scaling.signals`), from how many replicas on, how long a new
    one takes to serve, and how often the autoscaler looks. The replicas of the fleet are the most.
    """

    policy: str
    min: int = 1
    start_s: float = 120.0
    ask_s: float = 15.0


RTT_S = 0.0005
"""Between two machines of one network."""


@dataclass(frozen=True, slots=True)
class ProxyCluster:
    """Proxies that decide as one, over a network with this time for a round trip. `leader_dies_at_s` of the trace."""

    rtt_s: float = RTT_S
    leader_dies_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Replicas with distinct names, the faults of the timeline in the order of their times, and how many proxies stand
    in front, each knowing only its own requests unless they are a `cluster`. All replicas serve, unless the fleet
    scales. `kv_transfer` says what it takes to hand KV from one to another, where they have roles.
    """

    name: str
    replicas: tuple[ReplicaSpec, ...]
    faults: tuple[Fault, ...] = ()
    proxies: int = 1
    cluster: ProxyCluster | None = None
    autoscale: Autoscale | None = None
    kv_transfer: KvTransfer = KV_TRANSFER
    pinned: bool = False
    """Whether all requests of the tenant that comes first come by one proxy, and those of others by the rest."""

    @property
    def split_up(self) -> bool:
        """Whether any replica has a role of its own."""
        return any(spec.role is not Role.BOTH for spec in self.replicas)
