"""The settings of the core. They are derived from the configuration, whose schema has the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from llmproxy.core.domain import IDLE, Role, Usage

IDLE_CEILING = 0.01  # With a batch limit below 150, only a backend without any request takes a request of `idle`.
BELOW_HIGHEST = 0.99  # Maximum ceiling of lower bands, as a share of the highest, to keep some KV cache free.


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """Bounds of the work in flight on a backend."""

    initial_batch_limit: int  # Batch limit of an engine whose real limit is not yet learned.
    look_ahead: int | None  # Requests in flight above the limit, so that the engine never starves; None: learned.
    prompt_window_s: float | None  # Bound of the estimated seconds of a backend's unfinished prompts; None: no bound.
    kv_full_ratio: float  # KV cache usage (0..1] from which the cache counts as full.
    stale_after_s: float  # Age from which a reading is ignored.


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Conditions under which a backend is ejected or marked down."""

    failures_before_ejection: int  # Consecutive failed requests that eject a backend.
    ejection_s: float  # Duration of the first ejection in seconds. Each further ejection is twice as long.
    ejection_max_s: float
    misses_before_down: int  # Consecutive polls without a response that mark a backend down.
    # Maximum share (0..1) of a pool's backends that are up that may be ejected. At least one may be ejected, but never
    # the last backend of a model. A failed connection, a shutdown or the death of an engine always ejects.
    ejected_ratio_max: float
    slow_start_s: float  # Time over which a recovered backend is brought to its limit.
    hung_s: float  # Shortest silence that ejects a backend; inf for never.
    # Slowdown of a backend that ejects it: time per token divided by the backend's earlier time and by the slowdown of
    # the other backends; inf for never.
    slow_factor: float


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the waiting room over all pools; None: no bound. Tokens are estimates for prompt and answer."""

    requests_max: int
    bytes_max: int
    tokens_max: int | None
    band_requests_max: int
    band_bytes_max: int
    band_tokens_max: int | None
    flow_requests_max: int | None
    flow_bytes_max: int | None
    flow_tokens_max: int | None
    # Maximum wait while no backend of the pool is up; 0 refuses at once. The queue timeout is paused meanwhile.
    no_backend_wait_s: float
    startup_wait_s: float  # Longest wait before any backend was read; afterwards, `no_backend_wait_s` applies.


@dataclass(frozen=True, slots=True)
class UsageLimit:
    """The usage limit of a tenant or a model; None means no limit."""

    in_flight: int | None = None  # Requests beyond this number wait.
    requests_per_min: float | None = None  # Requests beyond a rate are refused.
    tokens_per_min: float | None = None  # Tokens of prompts and answers.
    requests_per_day: float | None = None  # Requests beyond a budget are refused until the next day.
    tokens_per_day: float | None = None


@dataclass(frozen=True, slots=True)
class External:
    """An endpoint elsewhere that takes requests for money, when the replicas are down or requests wait long."""

    models: frozenset[str]  # Models and adapters that it serves, by the names that the replicas list.
    price_per_million_input: float
    price_per_million_output: float
    # Seconds after which a waiting request goes to the endpoint although a replica is up; inf: never.
    only_above_wait_s: float
    max_per_day: float
    from_band: int
    price_per_million_cached: float | None = None  # Of cached prompt tokens; None: as the other prompt tokens.

    def cost(self, used: Usage) -> float:
        input_price, cached_price = self.price_per_million_input, self.price_per_million_cached
        cached_tokens = 0 if cached_price is None else min(used.cached_tokens or 0, used.prompt_tokens)
        money = (used.prompt_tokens - cached_tokens) * input_price + cached_tokens * (cached_price or 0.0)
        return (money + used.output_tokens * self.price_per_million_output) / 1e6


class Splitting(StrEnum):
    """Which requests are split into a prefill and a decode stage on two backends."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    TOKENS = "min_uncached_tokens"


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Settings of disaggregated prefill: which requests are split, and how."""

    splitting: Splitting
    lease_s: float  # Time for which a prefill engine pins the KV blocks of a prompt.
    min_uncached_tokens: int = 0  # For `Splitting.TOKENS`: the fewest uncached prompt tokens of a split request.


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Settings of the computation of the needed replicas."""

    pools: tuple[str, ...]  # Base models that may have no replica: their requests are held, and demand a replica.
    from_band: int  # Requests of this band and above demand replicas.
    min: int
    max: int | None
    target_wait_s: float  # Time within which the waiting requests should be served.
    utilisation: float  # Share (0..1] of a replica's time that is planned to be used.
    target_tpot_s: float | None  # Target time per token; None: the mean objective of the requests.
    start_s: float | None  # Time until a new replica is ready; None: as observed.
    idle_s: float  # Time without a request after which no replica is needed, if `min` is 0.


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of the core, and the choice of policies."""

    fairness: str
    ordering: str
    placement: str
    fairness_cost: str  # The resource that fairness policies share out.
    # Band -> saturation (0..1] from which the requests of the band wait. See `ceiling` for bands without an entry.
    ceilings: Mapping[int, float]
    # Time after the last request of a higher band for which lower bands keep to their ceilings (see `Headroom`).
    headroom_s: float
    min_shares: Mapping[int, float]  # Band -> guaranteed share (0..1) of the work.
    input_weight: float
    output_weight: float
    slo_window_s: float  # Rolling window of the fairness policy `slo`.
    preemption: bool
    refuse_late: bool  # Whether requests are refused that cannot meet their objective even if served next.
    limits: Mapping[str, UsageLimit]  # Name of a limit, such as `tenant:acme` or `model:sim`, -> limit.
    # Adapter name, or prefix with `*`, -> base model whose engines load such an adapter at its first request.
    unlisted: Mapping[str, str]
    prompt_ranges: Mapping[str, tuple[int, int]]  # Backend -> preferred prompt tokens.
    roles: Mapping[str, Role]  # Backend -> role, unless `both`.
    externals: Mapping[str, External]  # Name of an external backend -> its endpoint.
    capacity: CapacitySettings
    health: HealthSettings
    queue: QueueSettings
    scaling: ScalingSettings
    disaggregation: Disaggregation

    @property
    def ceiling_range(self) -> tuple[float, float]:
        """The saturations (0..1] to which the lowest (below others in use) and the highest band can fill a backend."""
        if not self.ceilings:
            return 1.0, 1.0
        lowest, highest = min(self.ceilings.values()), max(self.ceilings.values())
        return min(lowest, BELOW_HIGHEST * highest), highest

    def ceiling(self, band: int) -> float:
        """Returns the saturation (0..1] of the backends from which requests of `band` wait.

        A band without a configured ceiling has the ceiling of the next lower band. If there is no lower band, it has
        the lowest ceiling, or from `idle` down IDLE_CEILING. Without any ceilings, every band has 1.0.
        """
        below = [b for b in self.ceilings if b <= band]
        if self.ceilings and not below and band <= IDLE:
            return IDLE_CEILING
        chosen = max(below) if below else min(self.ceilings, default=None)
        return 1.0 if chosen is None else self.ceilings[chosen]
