"""The `/metrics` page of a simulated replica, with the families, labels and behaviour of vLLM 0.32.

Gauges show the state after the last engine step. `vllm:lora_requests_info` gets a new series for each combination of
adapters and keeps old series; the series with the newest value, a Unix time, is current.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily as _Counter
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmproxy.lab.simulator.engine.reports import Counters, Gauges, StepResult
from llmproxy.lab.simulator.engine.sequence import EngineRequest

# A real server never drops a series. More combinations than this are useless to any reader of the page.
_LORA_SERIES_MAX = 512
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HISTOGRAMS = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", _TOKENS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _STEP_TOKENS),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _FIRST_S),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _BETWEEN_S),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _BETWEEN_S),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _WHOLE_S),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _WHOLE_S),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _WHOLE_S),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _WHOLE_S),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _WHOLE_S),
}
_NIXL_HISTOGRAMS = {
    "nixl_xfer_time_seconds": (
        "Histogram of transfer duration for NIXL KV Cache transfers.",
        (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
    ),
    "nixl_bytes_transferred": (
        "Histogram of bytes transferred per NIXL KV Cache transfers.",
        tuple(2.0**power for power in range(11, 35, 2)),
    ),
}
_NIXL_COUNTERS = {
    "nixl_num_failed_transfers": "Number of failed NIXL KV Cache transfers.",
    "nixl_num_kv_expired_reqs": "Number of requests that had their KV expire.",
    "nixl_num_notifications_after_expiry": "Number of notifications for requests whose KV had expired.",
}
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def unix_now_s() -> float:
    """Returns the wall-clock time, for timestamps that clients see."""
    return datetime.now(UTC).timestamp()


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> Iterator[tuple[str, float]]:
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield "+Inf" if bound == float("inf") else str(float(bound)), float(total)


class ReplicaMetrics:
    """The metrics that a simulated replica publishes under vLLM's names, rendered from `registry`.

    `cache` has the labels of `vllm:cache_config_info`.
    """

    def __init__(self, model: str, max_loras: int, cache: dict[str, str], nixl: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.rejections = 0
        self.gauges = Gauges()
        self.lies = False  # Whether the load gauges show an idle engine, regardless of its state.
        self._totals = Counters()
        self._finished: Counter[str] = Counter()
        self._nixl: dict[str, int] = dict.fromkeys(_NIXL_COUNTERS, 0) if nixl else {}
        self._families = _HISTOGRAMS | (_NIXL_HISTOGRAMS if nixl else {})
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in self._families.items()}
        self._lora_series: OrderedDict[str, float] = OrderedDict()
        self._model = model
        self._max_loras = max_loras
        self._cache = cache
        self._created_s = unix_now_s()
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self.registry.register(_Page(self._now))
        self.registry.register(_Page(self._histogram_families))
        self.registry.register(_Page(self._http))

    def publish(self, gauges: Gauges, counters: Counters) -> None:
        self.gauges = gauges
        self._totals = replace(counters)
        if self._max_loras:
            names = ",".join(self.gauges.running_adapters)
            self._lora_series[names] = unix_now_s()
            self._lora_series.move_to_end(names)
            if len(self._lora_series) > _LORA_SERIES_MAX:
                self._lora_series.popitem(last=False)

    def step(self, result: StepResult, took_s: float, further_tokens: int) -> None:
        """Counts a step. `further_tokens` are its tokens, without the first tokens of sequences."""
        self._histograms["iteration_tokens_total"].observe(result.prefill_tokens + result.decode_tokens)
        if further_tokens:
            self._histograms["inter_token_latency_seconds"].observe(took_s, further_tokens)

    def first_token(self, arrived_s: float, admitted_s: float, now_s: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(now_s - arrived_s)
        self._histograms["request_queue_time_seconds"].observe(max(admitted_s - arrived_s, 0.0))
        self._histograms["request_prefill_time_seconds"].observe(now_s - admitted_s)

    def finished(
        self, sequence: EngineRequest, reason: str, arrived_s: float, admitted_s: float, first_s: float, now_s: float
    ) -> None:
        """Counts a finished sequence. Aborted sequences are not counted, as in vLLM."""
        self._finished[reason] += 1
        observed = {
            "request_prompt_tokens": sequence.prompt_tokens,
            "request_generation_tokens": sequence.output_tokens,
            "e2e_request_latency_seconds": now_s - arrived_s,
            "request_inference_time_seconds": now_s - admitted_s,
            "request_decode_time_seconds": now_s - first_s,
        }
        if sequence.output_tokens > 1:
            observed["request_time_per_output_token_seconds"] = (now_s - first_s) / (sequence.output_tokens - 1)
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def failed(self) -> None:
        self._finished["error"] += 1

    def count(self, name: str) -> None:
        self._nixl[name] += 1

    def transferred(self, took_s: float, transferred_bytes: int) -> None:
        self._histograms["nixl_xfer_time_seconds"].observe(took_s)
        self._histograms["nixl_bytes_transferred"].observe(transferred_bytes)

    def _now(self) -> Iterator[Metric]:
        gauges = Gauges() if self.lies else self.gauges
        running, waiting, used = gauges.running, gauges.waiting, gauges.kv_used
        yield self._family(_Gauge, "num_requests_running", "Number of requests in model execution batches.", running)
        yield self._family(_Gauge, "num_requests_waiting", "Number of requests waiting to be processed.", waiting)
        by_reason = {"capacity": waiting - gauges.deferred, "deferred": gauges.deferred}
        yield self._family(_Gauge, "num_requests_waiting_by_reason", "Waiting requests by reason.", by_reason, "reason")
        yield self._family(_Gauge, "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", used)
        totals = self._totals
        for name, (text, source) in _COUNTERS.items():
            yield self._family(_Counter, name, text, getattr(totals, source))
        # Cache hits count at admission, but a prompt only with its first token.
        computed = max(totals.prompt - totals.prefix_hits - totals.external, 0)
        by_source = {"local_compute": computed, "local_cache_hit": totals.prefix_hits}
        by_source["external_kv_transfer"] = totals.external
        text = "Number of prompt tokens by source."
        yield self._family(_Counter, "prompt_tokens_by_source", text, by_source, "source")
        if self._nixl:
            stages = {"waiting_to_start": gauges.to_fetch, "in_progress": gauges.fetching}
            stages["completed_waiting"] = gauges.fetched
            text = "Requests that wait for KV of another engine, by stage."
            yield self._family(_Gauge, "num_requests_kv_fetch_by_stage", text, stages, "stage")
        for name, total in self._nixl.items():
            yield self._family(_Counter, name, _NIXL_COUNTERS[name], total)
        success = {reason: self._finished[reason] for reason in _FINISH_REASONS}
        text = "Count of successfully processed requests."
        yield self._family(_Counter, "request_success", text, success, "finished_reason")
        text = "Number of admission attempts rejected by a queue limit, by reason."
        rejected = _Counter("vllm:admission_rejections", text, labels=["model_name", "reason"])
        rejected.add_metric([self._model, "max_num_queued_reqs"], self.rejections, created=self._created_s)
        yield rejected
        yield from self._infos()

    def _infos(self) -> Iterator[Metric]:
        if self._lora_series:
            labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
            lora = _Gauge("vllm:lora_requests_info", "Running stats on lora requests.", labels=labels)
            for names, stamp_s in self._lora_series.items():
                lora.add_metric([str(self._max_loras), names, names], stamp_s)
            yield lora
        text = "Information of the LLMEngine CacheConfig"
        info = _Gauge("vllm:cache_config_info", text, labels=list(self._cache))
        info.add_metric(list(self._cache.values()), 1.0)
        yield info

    def _histogram_families(self) -> Iterator[Metric]:
        for name, histogram in self._histograms.items():
            text, _ = self._families[name]
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["engine", "model_name"])
            family.add_metric(["0", self._model], list(histogram.buckets()), histogram.sum)
            yield family

    def _http(self) -> Iterator[Metric]:
        text = "Total number of requests by method, status and handler."
        family = _Counter("http_requests", text, labels=["handler", "method", "status"])
        for labels, total in self.requests.items():
            family.add_metric(list(labels), total, created=self._created_s)
        yield family

    def _family(
        self, kind: type[_Gauge] | type[_Counter], name: str, text: str, value: float | Mapping[str, float], *label: str
    ) -> Metric:
        """Returns a metric with a sample for each value of `label`, or without `label` with a single sample."""
        family = kind(f"vllm:{name}", text, labels=["engine", "model_name", *label])
        samples = [([one], known) for one, known in value.items()] if isinstance(value, Mapping) else [([], value)]
        for own, known in samples:
            if isinstance(family, _Counter):
                family.add_metric(["0", self._model, *own], known, created=self._created_s)
            else:
                family.add_metric(["0", self._model, *own], known)
        return family


_COUNTERS = {
    "prefix_cache_queries": ("Prefix cache queries, in terms of number of queried tokens.", "prefix_queries"),
    "prefix_cache_hits": ("Prefix cache hits, in terms of number of cached tokens.", "prefix_hits"),
    "external_prefix_cache_hits": ("External prefix cache hits, in terms of number of cached tokens.", "external"),
    "num_preemptions": ("Cumulative number of preemption from the engine.", "preemptions"),
    "prompt_tokens": ("Number of prefill tokens processed.", "prompt"),
    "prompt_tokens_cached": ("Number of cached prompt tokens (local + external).", "prefix_hits"),
    "generation_tokens": ("Number of generation tokens processed.", "generation"),
}
"""Metric name -> help text, and the field of `Counters`."""


class _Page(Collector):
    """A part of the page, so that a filtered scrape renders only the requested parts."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()
