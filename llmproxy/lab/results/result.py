"""The result of a simulation: what `result.json` holds, and the same averaged over seeds for tables and plots."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from statistics import fmean
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

FORMAT: Final = "llmproxy-simulate/1"
SIGNIFICANT_DIGITS = 6
REFERENCES = frozenset({"oracle"})
"""Yardsticks among the policies: they see what no policy can, so being better than the others is no merit."""


def _by_key(value: Any) -> Any:
    """The order in which a mapping was filled means nothing, so the bytes must not depend on it."""
    if isinstance(value, dict):
        return {key: _by_key(value[key]) for key in sorted(value)}
    return [_by_key(item) for item in value] if isinstance(value, list) else value


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Quantiles(_Model):
    """Mean and nearest-rank quantiles over completed requests, within 0.5 %; null where there was none."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class GroupResult(_Model):
    """The requests of one band or one tenant.

    Tokens and shares count completed requests (prompt and answer), except `asked_share`, which counts all that were
    offered with the answers they would have had.
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
    """One replica: the requests whose last answer it gave, and what it did for those that got a first token.

    `prefill_tokens` are prompt tokens that it computed, `hit_tokens` those that it found cached. `engine_preemptions`
    are those of its engine in the whole run. The means are over samples taken all along the trace: sequences in the
    batch, and requests waiting inside the engine.
    """

    requests: int
    prefill_tokens: int
    hit_tokens: int
    output_tokens: int
    engine_preemptions: int
    mean_running: float | None
    mean_waiting: float | None


class Utilisation(_Model):
    """Rates over the counted time, and means over samples taken all along the trace.

    `busy` is the share of samples at which a replica had something to do, `mean_running` and `mean_waiting` are per
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
    """What came out between the warm-up and the last arrival: a trace's tail, in which the fleet drains, is left out.

    `output_tokens` are those that were streamed in that time, by band, whatever became of their requests.
    """

    duration_s: float
    output_tokens: Annotated[dict[str, int], AfterValidator(_by_key)]

    @property
    def output_tokens_per_s(self) -> float:
        """Of all bands together; 0 where there was no such time."""
        return sum(self.output_tokens.values()) / self.duration_s if self.duration_s > 0 else 0.0


class FairnessResult(_Model):
    """How evenly tenants were served; null where nothing was to be compared.

    `counter_difference` is the most by which the virtual token counters of two backlogged flows of one band differed,
    for the whole run. `jain_least` is the least index of Jain (1 = all alike) of the weighted service (as in
    `service_difference_tokens`) of the tenants that were backlogged all through 60 s, over all such times.
    `adherence_least` is the least share of one tenant's requests that met their objectives, of those that ended within
    5 minutes, and `ended_most` the most requests, of all tenants, that did. `prompt_tokens_most` is the longest prompt,
    and `unfinished_tokens_most` the most that was dispatched and unfinished at a time.
    """

    counter_difference: float | None = None
    jain_least: float | None = None
    adherence_least: float | None = None
    ended_most: int = 0
    prompt_tokens_most: int = 0
    unfinished_tokens_most: int = 0


class PredictionResult(_Model):
    """How well a placement predicted the completed answers; null where it predicts nothing.

    The mean of |predicted - observed| / observed, and the share that took no longer than the predicted p90 (0.9 where
    that is right), of the time from the grant to the first token and of the mean time per token after it.
    """

    ttft_mape: float | None = None
    ttft_p90_coverage: float | None = None
    tpot_mape: float | None = None
    tpot_p90_coverage: float | None = None


class Point(NamedTuple):
    """Identifies a run of one simulation."""

    policy: str
    seed: int
    rate_scale: float = 1.0
    prefill_scale: float = 1.0


class FaultDetection(_Model):
    """A fault of one replica: `noticed_s` after it began a proxy had it down or ejected, null where none had."""

    kind: str
    replica: str
    at_s: float
    noticed_s: float | None


class ScaledResult(_Model):
    """A fleet that scaled: replicas on average (starting and leaving ones included) and at most, how often the wanted
    number turned round within two start-up times, and for how long fewer than 95 % of the arrivals kept their
    objectives (in sixtieths of the trace or longer).
    """

    mean: float
    peak: int
    turns: int
    violated_s: float = 0.0


class RunResult(_Model):
    """One policy at one load with one seed. Requests that arrived during the warm-up are in no figure.

    `offered` = `completed` + `refused` + `failed`, where refused ones left before a backend was given them, and
    `goodput` is the share of the offered ones that were completed within both objectives: a refusal and a failure are
    misses. `ttft_s` counts from the arrival, `tpot_s` is the mean time per output token after the first,
    `queue_wait_s` the time in the proxy's own waiting room, `e2e_s` from arrival to end.
    `hit_tokens_ratio` is over the prompt tokens of completed requests; `adapter_hit_ratio` is the share of requests
    with an adapter that found it in a slot when they were admitted, over the whole run. `prefill_imbalance` is
    max / mean over all replicas of the prompt tokens that they computed. `duration_s` is virtual time from the start of
    the trace to the last end. `service_difference_tokens` is the most by which the weighted service (1 per prompt
    token, 2 per output token) of two tenants differed over a time in which both were backlogged, null where there were
    no two. A tenant is backlogged while a request of it waits in the proxy, or, under policies that bind at once, has
    no first token. The last attempt of `split` requests had its prompt computed on one replica and its answer on
    another one, and `prefill_share` is the part of the replicas that prompts need, by the work that the proxy saw.
    `preemptions` are leases taken back for a request of a higher band, and `inversions` grants to a
    request while one of a higher band could have had them. `ejections` counts how often a replica was ejected,
    `noticed` says how soon each fault was detected, `replicas` how the fleet scaled, null where it did not. `by_tenant`
    names the largest tenants by tokens, and all others together as "(other)".
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


class WaitPoint(_Model):
    """Waiting in the proxy of the requests that arrived within one stretch of time, which begins at `at_s`."""

    at_s: float
    mean_s: float
    max_s: float


class Trail(_Model):
    """What the plots of one run need beyond its result; it is not part of `result.json`.

    The CDFs are pairs (value, share of the completed requests that have one and are not above it), `hits` pairs (time
    of arrival, hit ratio of all until then). `load` holds running plus waiting requests of each replica at the times
    `load_at_s`, `queued` those in the proxies. `attained` are pairs (time of arrival, share that kept its objectives)
    by stretch of time. `scaled` is (time, replicas wanted, replicas that serve) of a fleet that scales.
    """

    ttft_cdf: list[tuple[float, float]]
    tpot_cdf: list[tuple[float, float]]
    queue_wait: dict[str, list[WaitPoint]]
    hits: list[tuple[float, float]]
    load_at_s: list[float]
    load: dict[str, list[int]]
    queued: list[int] = []
    attained: list[tuple[float, float]] = []
    scaled: list[tuple[float, int, int]] = []


class Bound(_Model):
    """A limit that follows from the trace and the fleet alone; `about` says of what and under which assumptions.

    Null where it cannot be computed for this trace.
    """

    value: float | None
    unit: str
    about: str


class SimulationResult(_Model):
    """All runs of one trace on one fleet.

    `bounds` are by load, as `load_label` names it, and then by name, in the order in which they should be shown.
    """

    format: Literal["llmproxy-simulate/1"] = FORMAT
    runs: list[RunResult]
    bounds: dict[str, dict[str, Bound]] = Field(default_factory=dict)
    config: Annotated[dict[str, JsonValue], AfterValidator(_by_key)] = Field(default_factory=dict)


def load_label(rate_scale: float, prefill_scale: float) -> str:
    """The key of one load in `SimulationResult.bounds`, such as `rate_scale 1, prefill_scale 1.9`."""
    return f"rate_scale {rate_scale:g}, prefill_scale {prefill_scale:g}"


# --- bytes ------------------------------------------------------------------------------------------------------------


def to_bytes(result: SimulationResult) -> bytes:
    """`result.json`: equal results give equal bytes, in whatever order the runs were finished.

    Raises ValueError for a figure that is infinite or not a number.
    """
    runs = sorted(result.runs, key=lambda run: (run.prefill_scale, run.rate_scale, run.policy, run.seed))
    tree = rounded(result.model_copy(update={"runs": runs}).model_dump())
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def schema_bytes() -> bytes:
    """The JSON schema of `result.json`, as it is kept in `docs/laboratory/simulate-result.schema.json`."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **SimulationResult.model_json_schema(mode="serialization"),
    }
    return orjson.dumps(schema, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def rounded(value: Any, where: str = "") -> Any:
    """Floats to six digits, however deep they are: the rest is what the arithmetic of machines leaves."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where.lstrip('.')} is {value}, which JSON cannot say")
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item, f"{where}.{key}") for key, item in value.items()}
    return [rounded(item, f"{where}.{i}") for i, item in enumerate(value)] if isinstance(value, list) else value


# --- the same, averaged over seeds ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One policy at one load: means over its seeds, of those where the figure exists; None where it never does."""

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
    """All policies at one load."""

    rate_scale: float
    prefill_scale: float
    rows: tuple[Row, ...]
    bounds: dict[str, Bound]

    @property
    def label(self) -> str:
        return load_label(self.rate_scale, self.prefill_scale)


def policies_of(result: SimulationResult) -> list[str]:
    """The policies in the order of their first run, the references after all others."""
    policies = list(dict.fromkeys(run.policy for run in result.runs))
    return sorted(policies, key=lambda policy: policy in REFERENCES)


def load_points(result: SimulationResult) -> list[LoadPoint]:
    """The runs by load, lighter ones first, and the policies of each in the order of `policies_of`."""
    policies = policies_of(result)
    loads = sorted({(run.prefill_scale, run.rate_scale) for run in result.runs})
    points = []
    for prefill, rate in loads:
        here = [run for run in result.runs if (run.prefill_scale, run.rate_scale) == (prefill, rate)]
        by_policy = {policy: [run for run in here if run.policy == policy] for policy in policies}
        rows = tuple(_row(policy, runs) for policy, runs in by_policy.items() if runs)
        points.append(LoadPoint(rate, prefill, rows, result.bounds.get(load_label(rate, prefill), {})))
    return points


def best(rows: Iterable[Row], field: str) -> float | None:
    """The best of one field of rows: the largest goodput or hit ratio, else the smallest; None where there is none."""
    figures = [figure for row in rows if (figure := getattr(row, field)) is not None]
    return (max if field in ("goodput", "hit") else min)(figures, default=None)


def _row(policy: str, runs: list[RunResult]) -> Row:
    goodputs = [run.goodput for run in runs if run.goodput is not None]
    return Row(
        policy=policy,
        seeds=len(runs),
        goodput=_mean(goodputs),
        goodput_range=(min(goodputs), max(goodputs)) if goodputs else None,
        ttft_p50_s=_mean(run.ttft_s.p50 for run in runs),
        ttft_p99_s=_mean(run.ttft_s.p99 for run in runs),
        tpot_p50_s=_mean(run.tpot_s.p50 for run in runs),
        tpot_p99_s=_mean(run.tpot_s.p99 for run in runs),
        queue_wait_p99_s=_mean(run.queue_wait_s.p99 for run in runs),
        hit=_mean(run.hit_tokens_ratio for run in runs),
        imbalance=_mean(run.prefill_imbalance for run in runs),
        refused=_mean(run.refused / run.offered for run in runs if run.offered),
        failed=_mean(run.failed / run.offered for run in runs if run.offered),
    )


def _mean(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return fmean(known) if known else None


if __name__ == "__main__":
    sys.stdout.buffer.write(schema_bytes())
