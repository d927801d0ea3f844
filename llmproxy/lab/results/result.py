"""The result of a simulation: the models of `result.json`, and means over seeds for tables and plots."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

FORMAT: Final = "llmproxy-simulate/1"
SIGNIFICANT_DIGITS = 6
REFERENCES = frozenset({"oracle"})
"""Policies with knowledge that no real policy has. They are never marked as the best."""


def _by_key(value: Any) -> Any:
    """Sorts mappings by key, so that the bytes do not depend on insertion order."""
    if isinstance(value, dict):
        return {key: _by_key(value[key]) for key in sorted(value)}
    return [_by_key(item) for item in value] if isinstance(value, list) else value


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Quantiles(_Model):
    """Mean and nearest-rank quantiles over completed requests, accurate within 0.5 %; null without requests."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class GroupResult(_Model):
    """The requests of one band or one tenant.

    Tokens and `token_share` count prompts and answers of completed requests. `asked_share` counts all offered requests,
    with the full length of their answers.
    """

    offered: int
    completed: int
    refused: int
    failed: int
    goodput: float | None
    ttft_s: Quantiles
    tpot_s: Quantiles
    queue_wait_s: Quantiles
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    token_share: float | None
    asked_share: float | None


class BackendResult(_Model):
    """A replica. `requests` counts the requests whose last attempt was on this replica.

    Tokens are counted only for requests with a first token. `prefill_tokens` are computed prompt tokens, `hit_tokens`
    are cached prompt tokens. `engine_preemptions` are preemptions by the engine in the whole run. `mean_running` is the
    mean number of sequences in the batch, and `mean_waiting` the mean number of requests that wait inside the engine.
    Both are sampled while the replica serves, from the end of the warm-up to the last answer; null without samples.
    """

    requests: int
    prefill_tokens: int
    hit_tokens: int
    output_tokens: int
    engine_preemptions: int
    mean_running: float | None
    mean_waiting: float | None


class Utilisation(_Model):
    """Rates and means of samples from the end of the warm-up to the last answer.

    `busy` is the share of samples with a running or waiting request, `mean_running` and `mean_waiting` are per serving
    replica, and `mean_queued` counts requests that waited in the proxies.
    """

    completed_per_s: float | None
    prefill_tokens_per_s: float | None
    output_tokens_per_s: float | None
    busy: float | None
    mean_running: float | None
    mean_waiting: float | None
    mean_queued: float | None


class Loaded(_Model):
    """The output between the warm-up and the end of the trace, without the tail.

    The trace ends at its latest nominal arrival; in closed loops, requests may still arrive later.
    `output_tokens` are the tokens streamed in that time, by band, also of requests that failed later.
    """

    duration_s: float
    output_tokens: Annotated[dict[str, int], AfterValidator(_by_key)]

    @property
    def output_tokens_per_s(self) -> float:
        """The tokens per second of all bands; 0 if `duration_s` is 0."""
        return sum(self.output_tokens.values()) / self.duration_s if self.duration_s > 0 else 0.0


class FairnessResult(_Model):
    """Fairness between tenants; null where nothing can be compared.

    * `counter_difference`: the largest difference between the virtual token counters of two backlogged flows of one
      band in the whole run.
    * `jain_least`: the lowest Jain index (1: equal service) of any window of 60 s. The index compares the weighted
      service (1 per prompt token, 2 per output token) of the tenants that were backlogged during the whole window.
    * `adherence_least`: the least share of one tenant's requests that met their objectives, in any window of 5 minutes.
    * `ended_most`: the largest number of requests of all tenants that ended in a window of 5 minutes.
    * `prompt_tokens_most`: the longest prompt.
    * `unfinished_tokens_most`: the largest number of tokens at one time in requests that were dispatched and have not
      ended.
    """

    counter_difference: float | None = None
    jain_least: float | None = None
    adherence_least: float | None = None
    ended_most: int = 0
    prompt_tokens_most: int = 0
    unfinished_tokens_most: int = 0


class PredictionResult(_Model):
    """Errors of a placement's predictions for completed answers; null without predictions.

    `ttft` counts from the grant to the first token, and `tpot` is the mean time per later token. `mape` is the mean of
    |predicted - observed| / observed. `p90_coverage` is the share of answers within the predicted p90, 0.9 if the
    prediction is right.
    """

    ttft_mape: float | None = None
    ttft_p90_coverage: float | None = None
    tpot_mape: float | None = None
    tpot_p90_coverage: float | None = None


class Point(NamedTuple):
    """The parameters that identify one run of a simulation."""

    policy: str
    seed: int
    rate_scale: float = 1.0
    prefill_scale: float = 1.0


class FaultDetection(_Model):
    """A fault of a replica. `noticed_s`: seconds until a proxy ejected it or marked it down; null if no proxy did."""

    kind: str
    replica: str
    at_s: float
    noticed_s: float | None


class ScaledResult(_Model):
    """The scaling of a fleet.

    `mean` and `peak` count replicas; `mean` includes replicas that start or leave. `turns` counts how often the wanted
    number changed its direction within two start-up times. `violated_s` is the total length of the intervals in which
    less than 95 % of the arrivals met their objectives; an interval is a sixtieth of the trace or longer.
    """

    mean: float
    peak: int
    turns: int
    violated_s: float = 0.0


class RunResult(_Model):
    """A run: one policy at one load with one seed. Requests that arrived during the warm-up are in no figure.

    * `offered` = `completed` + `refused` + `failed`. Refused requests left before they got a backend.
    * `goodput`: the share of offered requests that were completed within both objectives, where set; null without
      requests.
    * `ttft_s`: from the arrival to the first token. `tpot_s`: mean time per later token. `queue_wait_s`: time in the
      proxy's queue. `e2e_s`: from the arrival to the end.
    * `hit_tokens_ratio`: the cached share of the prompt tokens of completed requests.
    * `adapter_hit_ratio`: the share of requests whose adapter was in a slot at their admission, in the whole run.
    * `prefill_imbalance`: the most prompt tokens that a replica computed, divided by the mean of replicas that served.
    * `duration_s`: the length of the trace, or the virtual time of the last end if that is later. `counted_s`: the part
      of it after the warm-up.
    * `service_difference_tokens`: the largest difference of weighted service (1 per prompt token, 2 per output token)
      between two tenants while both were backlogged; null if no two were. A tenant is backlogged while one of its
      requests waits in the proxy or, under policies that choose the replica on arrival, has no first token.
    * `split`: requests whose last attempt had prefill and decode on different replicas.
    * `prefill_share`: the part of the work, 0 to 1, that is prompts, as the first proxy learned it; null if it learned
      none.
    * `preemptions`: leases revoked for a request of a higher band. `inversions`: grants that a waiting request of a
      higher band could have used.
    * `ejections`: how often a replica was ejected. `noticed`: the seconds until each fault was detected.
    * `replicas`: the scaling of the fleet; null without an autoscaler.
    * `by_tenant`: the largest tenants by tokens, and all others together as "(other)".
    """

    policy: str
    seed: int
    rate_scale: float
    prefill_scale: float
    offered: int
    completed: int
    refused: int
    failed: int
    goodput: float | None
    ttft_s: Quantiles
    tpot_s: Quantiles
    queue_wait_s: Quantiles
    e2e_s: Quantiles
    hit_tokens_ratio: float | None
    adapter_hit_ratio: float | None
    prefill_imbalance: float | None
    service_difference_tokens: float | None
    duration_s: float
    counted_s: float
    attempts: int
    split: int = 0
    prefill_share: float | None = None
    preemptions: int
    inversions: int
    ejections: int = 0
    noticed: list[FaultDetection] = []
    replicas: ScaledResult | None = None
    outcomes: Annotated[dict[str, int], AfterValidator(_by_key)]
    utilisation: Utilisation
    loaded: Loaded
    fairness: FairnessResult
    prediction: PredictionResult = PredictionResult()
    by_band: Annotated[dict[str, GroupResult], AfterValidator(_by_key)]
    by_tenant: Annotated[dict[str, GroupResult], AfterValidator(_by_key)]
    by_backend: Annotated[dict[str, BackendResult], AfterValidator(_by_key)]

    @property
    def point(self) -> Point:
        return Point(self.policy, self.seed, self.rate_scale, self.prefill_scale)


class Trail(_Model):
    """Additional data of one run for plots of autoscaling. It is not part of `result.json`.

    * `queued`: requests in the proxies at the times `load_at_s`.
    * `attained`: (time of arrival, share of requests that met their objectives) by interval.
    * `scaled`: (time, wanted replicas, serving replicas) of a fleet with an autoscaler.
    """

    load_at_s: list[float]
    queued: list[int] = []
    attained: list[tuple[float, float]] = []
    scaled: list[tuple[float, int, int]] = []


class Bound(_Model):
    """A limit computed from the trace and the fleet alone; null if it cannot be computed for this trace.

    `about` has its meaning and its assumptions.
    """

    value: float | None
    unit: str
    about: str


class SimulationResult(_Model):
    """All runs of one trace on one fleet.

    `bounds` maps a load, such as `rate_scale 1, prefill_scale 1.9`, to its bounds (name -> bound, in display order).
    """

    format: Literal["llmproxy-simulate/1"] = FORMAT
    runs: list[RunResult]
    bounds: dict[str, dict[str, Bound]] = Field(default_factory=dict)
    config: Annotated[dict[str, JsonValue], AfterValidator(_by_key)] = Field(default_factory=dict)


def load_label(rate_scale: float, prefill_scale: float) -> str:
    """Returns the key of a load in `SimulationResult.bounds`, such as `rate_scale 1, prefill_scale 1.9`."""
    return f"rate_scale {rate_scale:g}, prefill_scale {prefill_scale:g}"


# --- bytes ------------------------------------------------------------------------------------------------------------


def to_bytes(result: SimulationResult) -> bytes:
    """Encodes `result.json`. Equal results give equal bytes, in whatever order the runs ended.

    Raises ValueError for a figure that is infinite or not a number.
    """
    runs = sorted(result.runs, key=lambda run: (run.prefill_scale, run.rate_scale, run.policy, run.seed))
    tree = rounded(result.model_copy(update={"runs": runs}).model_dump())
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def schema_bytes() -> bytes:
    """Returns the JSON schema of `result.json`: `docs/laboratory/simulate-result.schema.json`."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **SimulationResult.model_json_schema(mode="serialization"),
    }
    return orjson.dumps(schema, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def rounded(value: Any, where: str = "") -> Any:
    """Rounds all floats of a nested value to six significant digits; further digits are rounding errors."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where.lstrip('.')} is {value}, which JSON cannot say")
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item, f"{where}.{key}") for key, item in value.items()}
    return [rounded(item, f"{where}.{i}") for i, item in enumerate(value)] if isinstance(value, list) else value


# --- the same, averaged over seeds ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A policy at one load: means over the seeds that have the figure; None without such seeds."""

    policy: str
    seeds: int
    goodput: float | None
    goodput_range: tuple[float, float] | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    queue_wait_p99_s: float | None
    hit: float | None
    imbalance: float | None
    refused: float | None
    failed: float | None


class LoadPoint(NamedTuple):
    """The figures of all policies at one load: an arrival rate and a cost of prompt tokens."""

    rate_scale: float
    prefill_scale: float
    rows: tuple[Row, ...]
    bounds: dict[str, Bound]

    @property
    def label(self) -> str:
        return load_label(self.rate_scale, self.prefill_scale)


def policies_of(result: SimulationResult) -> list[str]:
    """Returns the policies in the order of their first run, references last."""
    policies = list(dict.fromkeys(run.policy for run in result.runs))
    return sorted(policies, key=lambda policy: policy in REFERENCES)


def load_points(result: SimulationResult) -> list[LoadPoint]:
    """Returns the runs of each load, lighter loads first, with the policies in the order of `policies_of`."""
    policies = policies_of(result)
    loads = sorted({(run.prefill_scale, run.rate_scale) for run in result.runs})
    points = []
    for prefill, rate in loads:
        here = [run for run in result.runs if (run.prefill_scale, run.rate_scale) == (prefill, rate)]
        by_policy = {policy: [run for run in here if run.policy == policy] for policy in policies}
        rows = tuple(row_of(policy, runs) for policy, runs in by_policy.items() if runs)
        points.append(LoadPoint(rate, prefill, rows, result.bounds.get(load_label(rate, prefill), {})))
    return points


def best(rows: Iterable[Row], field: str) -> float | None:
    """Returns the largest value of goodput or hit ratio, the smallest value of other fields; None without values."""
    figures = [figure for row in rows if (figure := getattr(row, field)) is not None]
    return (max if field in ("goodput", "hit") else min)(figures, default=None)


def row_of(policy: str, runs: Sequence[RunResult]) -> Row:
    goodputs = [run.goodput for run in runs if run.goodput is not None]
    return Row(
        policy=policy,
        seeds=len(runs),
        goodput=mean_of(goodputs),
        goodput_range=(min(goodputs), max(goodputs)) if goodputs else None,
        ttft_p50_s=mean_of(run.ttft_s.p50 for run in runs),
        ttft_p99_s=mean_of(run.ttft_s.p99 for run in runs),
        tpot_p50_s=mean_of(run.tpot_s.p50 for run in runs),
        tpot_p99_s=mean_of(run.tpot_s.p99 for run in runs),
        queue_wait_p99_s=mean_of(run.queue_wait_s.p99 for run in runs),
        hit=mean_of(run.hit_tokens_ratio for run in runs),
        imbalance=mean_of(run.prefill_imbalance for run in runs),
        refused=mean_of(run.refused / run.offered for run in runs if run.offered),
        failed=mean_of(run.failed / run.offered for run in runs if run.offered),
    )


def mean_of(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return fmean(known) if known else None


if __name__ == "__main__":
    sys.stdout.buffer.write(schema_bytes())
