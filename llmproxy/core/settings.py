"""The settings of the core. The configuration file maps onto them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Role
from llmproxy.core.scaling.groups import Group

BELOW_HIGHEST = 0.99
"""The most that a band below the highest one in use may fill of what that one may: a KV-cache is never quite full."""


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """How much work a backend is given.

    `start_limit` is the batch limit assumed of an engine before its own numbers teach better; `look_ahead` requests may
    be in flight above the limit so that the engine never starves, None for as many as `core.backends` finds. The
    prompts given to it may take `prompt_window_s`, None for any time, where the placement estimates times; above
    `kv_full` (0..1) a KV-cache counts as full. Readings older than `stale_after_s` are not believed.
    """

    start_limit: int = 4
    look_ahead: int | None = None
    prompt_window_s: float | None = 0.3
    kv_full: float = 1.0
    stale_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When a backend is ejected and when it may try again.

    `failures` requests in a row eject for `backoff_s`, doubled each time up to `backoff_max_s`. At most `ejected_max`
    (0..1) of the backends of a pool that are up are ejected. One may always be ejected, but never the last that serves
    a model. `unreachable_after` polls in a row without an
    answer mark the backend down. One that comes back is brought to its limit over `slow_start_s`. `hung_s` of silence
    and `slow_factor` times as slow as it was are the limits of outlier detection, `inf` for never.
    """

    failures: int = 3
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    unreachable_after: int = 2
    ejected_max: float = 0.5
    slow_start_s: float = 5.0
    hung_s: float = 1.5
    slow_factor: float = 5.0


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the waiting room, over all pools of the process; None is no bound of that kind.

    Tokens are the estimate of a prompt and its answer. `hold_s` is how long a request may wait while its pool has no
    backend that is up; its own time to wait stands still meanwhile. 0 refuses at once. `first_hold_s`
    bounds that where no backend was ever read.
    """

    requests_max: int = 20_000
    bytes_max: int = 1 << 30
    tokens_max: int | None = None
    band_requests_max: int = 10_000
    band_bytes_max: int = 1 << 30
    band_tokens_max: int | None = None
    flow_requests_max: int | None = None
    flow_bytes_max: int | None = None
    flow_tokens_max: int | None = None
    hold_s: float = 30.0
    first_hold_s: float = 10.0


@dataclass(frozen=True, slots=True)
class UsageLimit:
    """What one tenant or one model may use; None is no limit.

    Requests beyond `in_flight` wait; requests beyond a rate are refused. Tokens are those of prompts and answers.
    """

    in_flight: int | None = None
    requests_per_min: float | None = None
    tokens_per_min: float | None = None

    def part(self, parts: int) -> UsageLimit:
        """What one of so many processes may allow where none knows of the others; one in flight at least."""
        if parts == 1:
            return self
        return UsageLimit(
            None if self.in_flight is None else max(1, self.in_flight // parts),
            None if self.requests_per_min is None else self.requests_per_min / parts,
            None if self.tokens_per_min is None else self.tokens_per_min / parts,
        )


class Splitting(StrEnum):
    """Which requests have their prompt computed on one backend and their answer on another one."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    TOKENS = "min_uncached_tokens"


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """See `core.placement.staged`. `min_uncached_tokens` is for `Splitting.TOKENS`, and 0 for any other.

    An engine keeps a prompt for another one for `lease_s`.
    """

    splitting: Splitting = Splitting.AUTO
    min_uncached_tokens: int = 0
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """How the number of replicas that a pool needs is found, see `core.scaling.need`.

    `pools` are base models that may have no replica at the moment: their requests are held, and ask for one.
    Requests of the band `from_band` and above ask for replicas. The number is within `min` and `max`, None for any.
    What waits should be served within `drain_s`. A replica is used up to `utilisation` (0..1], and keeps
    `target_tpot_s` per token; None takes the mean objective of the requests. A new replica is ready after `start_s`;
    None takes what was seen.
    After `idle_s` without a request none is needed. `groups` are kinds of replicas, with neither their speed nor their
    number.
    """

    pools: tuple[str, ...] = ()
    from_band: int = DEFAULT
    min: int = 1
    max: int | None = None
    drain_s: float = 60.0
    utilisation: float = 0.8
    target_tpot_s: float | None = None
    start_s: float | None = None
    idle_s: float = 900.0
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """All of the above, and the choice of policies.

    `ceilings` maps a band to the saturation at which it waits (0..1]; a band without one takes that of the next lower
    band that has one. What a ceiling leaves free is kept for a higher band for `headroom_s` after its last request; it
    is a slot at least, see `core.queueing.headroom`.
    `min_shares` maps a band to the share of the work (0..1) that it gets while it waits, whatever waits above it.
    `charged` is the resource that counting policies share out. `ageing_s` is after how long the `shortest` ordering
    serves by age. `quantum_tokens` is how much a flow may have at a stretch under `locality_fair_share`,
    `slo_window_s` the rolling window of `slo`. `refuse_late` refuses requests that cannot meet their objective even if
    served next. `limits` maps the names in `Request.limits` to what they allow, `prompt_ranges` a backend to the least
    and the most tokens of the prompts that it is meant for, `roles` a backend to its role if that is not `both`.
    `unlisted` maps names of adapters, or what they begin with and `*`, to the base model whose engines load them when
    they are first asked for.
    """

    fairness: str = "fair_share"
    ordering: str = "least_slack"
    placement: str = "cost"
    charged: str = "tokens"
    ceilings: Mapping[int, float] = field(default_factory=lambda: {CRITICAL: 1.0, DEFAULT: 0.95, SHEDDABLE: 0.85})
    headroom_s: float = 60.0
    min_shares: Mapping[int, float] = field(default_factory=dict)
    input_weight: float = 1.0
    output_weight: float = 2.0
    quantum_tokens: float = 16_384.0
    slo_window_s: float = 300.0
    ageing_s: float = 30.0
    preemption: bool = True
    refuse_late: bool = False
    limits: Mapping[str, UsageLimit] = field(default_factory=dict)
    unlisted: Mapping[str, str] = field(default_factory=dict)
    prompt_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    capacity: CapacitySettings = field(default_factory=CapacitySettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    disaggregation: Disaggregation = Disaggregation()

    @property
    def ceiling_range(self) -> tuple[float, float]:
        """The saturation (0..1] beyond which traffic of the lowest band alone fills no backend, and the same of the
        highest band.
        """
        if not self.ceilings:
            return 1.0, 1.0
        lowest, highest = min(self.ceilings.values()), max(self.ceilings.values())
        return min(lowest, BELOW_HIGHEST * highest), highest

    def ceiling(self, band: int) -> float:
        """The saturation (0..1] at which `band` waits; non-increasing by priority whenever `ceilings` is."""
        below = [b for b in self.ceilings if b <= band]
        chosen = max(below) if below else min(self.ceilings, default=None)
        return 1.0 if chosen is None else self.ceilings[chosen]
