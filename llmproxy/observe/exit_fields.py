"""The table of the fields of `RequestExit`, from which its log line, decision log and metrics are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from llmproxy.core.domain import GrantReason
from llmproxy.observe.exit import NEVER_GRANTED, RequestExit
from llmproxy.observe.series import Counts, Distributions
from llmproxy.observe.text import ShownNames, shown

_names, _agents = ShownNames(), ShownNames()


class Shape(NamedTuple):
    """How the values of a field are written: in the log as text, in the log as JSON, and in the decision log.

    `text` is a Python expression over `value`. If `json` or `decision` is None, the value stays unchanged.
    """

    text: str
    json: Callable[[Any], Any] | None = None
    decision: Callable[[Any], Any] | None = None


class Feed(NamedTuple):
    """A metric that a field changes.

    A request without a tenant changes no metric with the label `tenant`, and the same holds for `backend`.
    """

    metric: str  # Name in `metrics`, which defines its kind, buckets and labels.
    given: tuple[str, ...] = ()  # Values of the labels that are not in `_NAMES`, in order.
    amount: str = "value"  # Expression that counters add and histograms observe.
    when: str = "True"  # Expression: the condition of the change.


class Field(NamedTuple):
    """A field of `RequestExit`, and its names in the log line and in the decision log. Both omit a value of None."""

    source: str  # Path of the attribute in `RequestExit`.
    shape: Shape
    log: str = ""  # Name in the log line, "" to leave it out.
    decision: str = ""  # Name in the decision log, "" to leave it out.
    optional: bool = False  # Whether the field is left out also if it is 0 or empty.
    streams: bool = False  # Whether the field counts as None unless the answer is a stream.
    feeds: tuple[Feed, ...] = ()


def why_fields(why: GrantReason) -> dict[str, Any]:
    """Returns the reasons of a grant as log fields. Bands are integers."""
    return {
        "waiting": {str(level): waiting for level, waiting in why.waiting},
        "flows": why.flows,
        "standing": {name: round(value, 4) for name, value in why.standing},
        "passed_over": why.passed_over,
        "guaranteed": why.guaranteed,
        **({"inverted": True} if why.inverted else {}),
        **({"probe": True} if why.probe else {}),
        **({"waited_for": why.waited.rule, "went_first": why.waited.went_first} if why.waited is not None else {}),
    }


def _microseconds(value_s: float) -> float:
    return round(value_s, 6)


def _tokens(direction: str) -> tuple[Feed, ...]:
    # A counter must not fall, and an engine may report a negative number.
    return tuple(Feed(name, (direction,), when="value > 0") for name in ("tokens_total", "tenant_tokens_total"))


def _comparisons(time: str, predicted: str, observed: str = "True") -> tuple[Feed, ...]:
    """Returns the feeds that compare a time with its prediction.

    `time` is the label, `predicted` the expression of the prediction. The condition `observed` must also be true.
    """
    when = f"{predicted} is not None and value > 0.0 and {observed}"
    return (
        Feed("prediction_seconds_total", (time, "predicted"), f"{predicted}.expected_s", when),
        Feed("prediction_seconds_total", (time, "observed"), "value", when),
        Feed("prediction_error_ratio", (time,), f"{predicted}.error_ratio(value)", when),
        # Also added if 0, so that the series exists: a quotient with a missing series would be missing, not 0.
        Feed("predictions_covered_total", (time,), f"{predicted}.covers(value)", when),
    )


NUMBER = Shape("value")
TEXT = Shape("shown(value)")
NAME = Shape("names[value]")  # A text that many requests share; its printable form is cached.
AGENT = Shape("agents[value]")
SECONDS = Shape("round(value, 4)", lambda value: round(value, 4), _microseconds)
COST = Shape("round(value, 6)", lambda value: round(value, 6), _microseconds)
INSTANT = SECONDS._replace()
"""An instant on the scheduler's clock; in the decision log, seconds since the log was opened."""
PREDICTED = Shape(
    "shown(value)", None, lambda predicted: {name: _microseconds(value) for name, value in predicted.items()}
)
WHY = Shape("shown(why_fields(value))", why_fields, why_fields)
TERMS = Shape(
    """'{' + ','.join([f'{names[name]}:{round(term, 4)}' for name, term in value]) + '}'""",
    lambda terms: {name: round(value, 4) for name, value in terms},
    lambda terms: {name: round(value, 6) for name, value in terms},
)

# In Python 3.11, `value` of an enum is a property of two calls, and `_value_` is its attribute.
FIELDS = (
    Field("outcome._value_", NAME, "outcome", "outcome",
          feeds=(Feed("requests_total", amount="1"), Feed("tenant_requests_total", amount="1"))),
    Field("status", NUMBER, "status", "status"),
    Field("model", NAME, "model", "model"),
    Field("unknown_model", TEXT, "unknown_model"),
    Field("target", NAME, "target"),
    Field("adapter", NAME, "", "adapter"),
    Field("tenant", NAME, "tenant", "tenant", optional=True),
    Field("key", NAME, "key"),
    Field("client", TEXT, "client"),
    Field("user_agent", AGENT, "user_agent"),
    Field("band", NAME, "band", "band"),
    Field("level", NUMBER, "", "criticality"),
    Field("flow", NAME, "flow", "flow"),
    Field("last.backend", NAME, "backend", "backend"),
    Field("attempts", NUMBER, "attempts", "attempts",
          feeds=(Feed("retries_total", amount="retries", when="retries > 0"),)),
    Field("continued", NAME, "continued", "continued",
          feeds=(Feed("continued_streams_total", amount="1", when="last.committed"),)),
    Field("not_continued", TEXT, "not_continued", "not_continued"),
    Field("preemptions", NUMBER, "preemptions", optional=True,
          feeds=(Feed("preemptions_total", when="value > 0"),)),
    Field("preemptions", NUMBER, "", "preemptions"),
    Field("split", NAME, "disaggregation", "disaggregation", feeds=(Feed("disaggregation_total", amount="1"),)),
    Field("prefill_backend", NAME, "prefill_backend", "prefill_backend"),
    Field("prefill_s", SECONDS, "prefill_s", "prefill_s", feeds=(Feed("prefill_seconds"),)),
    Field("handover_s", SECONDS, "handover_s", "handover_s", feeds=(Feed("handover_seconds"),)),
    Field("arrived_s", INSTANT, "arrived_s", "at_s"),
    Field("last.granted_s", INSTANT, "granted_s", "granted_at_s"),
    Field("ended_s", INSTANT, "", "ended_at_s"),
    Field("last.queued_ahead", NUMBER, "queued_ahead", "queued_ahead"),
    Field("queue_wait_s", SECONDS, "queue_wait_s", "queue_wait_s",
          feeds=(Feed("queue_wait_seconds"), Feed("tenant_queue_wait_seconds"))),
    Field("max_wait_s", NUMBER, "", "max_wait_s"),
    Field("ttft_s", SECONDS, "ttft_s", "ttft_s",
          feeds=(Feed("time_to_first_token_seconds", when="ended.stream"),)),
    Field("time_per_output_token_s", SECONDS, "", "tpot_s", streams=True,
          # An answer in one piece shows no time per token.
          feeds=(Feed("time_per_output_token_seconds"),
                 *_comparisons("tpot", "tpot", "last.chunks > 1 and how is None"))),
    Field("backend_ttft_s", SECONDS, streams=True, feeds=_comparisons("ttft", "ttft")),
    Field("duration_s", SECONDS, "duration_s",
          feeds=(Feed("request_seconds", when="outcome == 'completed'"),)),
    Field("ttft_slo_s", NUMBER, "", "ttft_slo_s"),
    Field("tpot_slo_s", NUMBER, "", "tpot_slo_s"),
    Field("met", NUMBER, "met", "met",
          feeds=(Feed("objectives_total", ("met",), "1", "value"),
                 Feed("objectives_total", ("missed",), "1", "not value"))),
    Field("unknown_objective", TEXT, "unknown_objective", feeds=(Feed("unknown_objectives_total", amount="1"),)),
    Field("last.prompt_tokens", NUMBER, "prompt_tokens", feeds=_tokens("input")),
    Field("known_prompt_tokens", NUMBER, "", "prompt_tokens"),
    Field("last.cached_tokens", NUMBER, "cached_tokens", "cached_tokens", feeds=(*_tokens("cached"), *(
        Feed("prefix_tokens_total", (kind,), amount, "expected is not None and value >= 0")
        for kind, amount in (("expected", "expected"), ("cached", "value"), ("both", "min(expected, value)"))))),
    Field("last.expected_cached_tokens", NUMBER, "expected_cached_tokens"),
    Field("last.output_tokens", NUMBER, "output_tokens", "output_tokens", feeds=_tokens("output")),
    Field("last.cost", COST, "cost", "cost", optional=True, feeds=(Feed("external_cost_total", when="value > 0.0"),)),
    Field("stream", NUMBER, "stream", "stream"),
    Field("last.chunks", NUMBER, "chunks", optional=True),
    Field("last.max_gap_s", SECONDS, "max_gap_s"),
    Field("mean_gap_s", SECONDS, streams=True, feeds=(Feed("inter_chunk_seconds", ("mean",)),
          Feed("inter_chunk_seconds", ("max",), "value if longest_s is None else longest_s"))),
    Field("body_bytes", NUMBER, "body_bytes"),
    Field("response_bytes", NUMBER, "response_bytes"),
    Field("last.candidates", NUMBER, "candidates", "candidates"),
    Field("last.terms", TERMS, "terms", "placement", optional=True),
    Field("last.why", WHY, "", "why"),
    Field("last.predicted", PREDICTED, "", "predicted", optional=True),
    Field("method", NAME, "method"),
    Field("path", NAME, "path"),
    Field("request_id", TEXT, "request_id", "request_id"),
    Field("error", TEXT, "error"),
)  # fmt: skip

_LOG = tuple(field for field in FIELDS if field.log)
_DECISION = tuple(field for field in FIELDS if field.decision)
_decision_values = attrgetter(*(field.source for field in _DECISION))


_BEGIN = ("def fill(ended):", "    last = ended.tried[-1] if ended.tried else never_granted")
_SCOPE: dict[str, Any] = {
    "never_granted": NEVER_GRANTED,
    "names": _names,
    "agents": _agents,
    "shown": shown,
    "why_fields": why_fields,
}
"""The names that `_BEGIN` and the expressions of shapes use."""


def _read(field: Field) -> str:
    """Returns the expression for the value of a field, valid after the lines of `_BEGIN`."""
    value = f"ended.{field.source}".replace("ended.last.", "last.")
    return f"{value} if ended.stream else None" if field.streams else value


def _compiled(begin: str, step: Callable[[int, Field], str]) -> Callable[[RequestExit], Any]:
    """Compiles a function that adds the fields of the log line to `begin`, with one statement per field.

    A loop over the table would take 1.5 times as long. `step` gets the number of a field and the field, and returns the
    statement, which reads `value` and changes `made`.
    """
    scope = dict(_SCOPE)
    lines = [*_BEGIN, f"    made = {begin}"]
    for number, field in enumerate(_LOG):
        scope[f"json_{number}"] = field.shape.json
        condition = "value" if field.optional else "value is not None"
        lines += [f"    value = {_read(field)}", f"    if {condition}: {step(number, field)}"]
    exec("\n".join([*lines, "    return made"]), scope)
    fill: Callable[[RequestExit], Any] = scope["fill"]
    return fill


exit_text: Callable[[RequestExit], str] = _compiled(
    '""', lambda _, field: f'made += f" {field.log}={{{field.shape.text}}}"'
)
"""Returns the fields of a log line as ` name=value`, where each value is a printable word or JSON string."""
exit_fields: Callable[[RequestExit], dict[str, Any]] = _compiled(
    "{}", lambda number, field: f'made["{field.log}"] = ' + (f"json_{number}(value)" if field.shape.json else "value")
)
"""Returns the fields of a log line: name -> value. Seconds are rounded to 0.1 ms."""


def decision_fields(ended: RequestExit, origin_s: float) -> dict[str, Any]:
    """Returns the fields of a line of the decision log.

    Durations are rounded to 1 µs. Times of the scheduler's clock count from `origin_s`.
    """
    fields = {}
    for field, value in zip(_DECISION, _decision_values(ended), strict=True):
        if value is None or (field.optional and not value):
            continue
        if field.shape is INSTANT:
            value -= origin_s
        fields[field.decision] = value if field.shape.decision is None else field.shape.decision(value)
    return fields


_NAMES = {
    "outcome": "ended.outcome._value_",
    "code": '"none" if outcome == "cancelled" else f"{ended.status // 100}xx"',
    "band": 'ended.band or "none"', "model": "models(ended.model)",
    "tenant": "tenants(ended.tenant) if ended.tenant else None", "backend": "last.backend",
    "mode": "ended.split", "how": "ended.continued",
    # A preemption is no failure, and the attempt that follows it is no retry.
    "retries": "ended.attempts - ended.preemptions - 1",
    "expected": "last.expected_cached_tokens", "ttft": "last.predicted_ttft",
    "tpot": "last.predicted_tpot", "longest_s": "last.max_gap_s",
}  # fmt: skip
"""Maps each name that feeds and metric labels use to its expression."""


def exit_recorder(
    series: Mapping[str, Counts | Distributions], models: Callable[[str], str], tenants: Callable[[str], str]
) -> Callable[[RequestExit], None]:
    """Compiles a function that counts a request in `series`.

    `series` maps the name of a metric to its counter or histogram. `models` and `tenants` return the value of a label
    for a name, because the number of values is limited.
    """
    scope: dict[str, Any] = {**_SCOPE, "models": models, "tenants": tenants, **series}
    lines = [*_BEGIN, *(f"    {label} = {source}" for label, source in _NAMES.items())]
    for field in FIELDS:
        lines += [f"    value = {_read(field)}", "    if value is not None:"] if field.feeds else []
        for feed in field.feeds:
            to, given = series[feed.metric], iter(feed.given)
            key = "".join(f"{label}, " if label in _NAMES else f"{next(given)!r}, " for label in to.labels)
            known = "".join(f" and {label} is not None" for label in ("tenant", "backend") if label in to.labels)
            change = f" += {feed.amount}" if isinstance(to, Counts) else f".observe({feed.amount})"
            lines.append(f"        if {feed.when}{known}: {feed.metric}[({key})]{change}")
    exec("\n".join(lines), scope)
    fill: Callable[[RequestExit], None] = scope["fill"]
    return fill
