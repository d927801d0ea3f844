"""Which trace a request belongs to, and whether it is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmproxy.config import Config, ConfigError
from llmproxy.observe.trace_context import RATIO, Sampler

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
TRACED = Config(tracing=True)


def sampler(name: str = "parentbased_always_off", **variables: str) -> Sampler:
    made = Sampler.of(TRACED, {"OTEL_TRACES_SAMPLER": name, **variables})
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("traceparents", "sampled"),
    [
        ([PARENT], True),
        ([f"00-{TRACE}-{SPAN}-00"], False),
        ([f"00-{TRACE}-{SPAN}-03"], True),
        ([f"cc-{TRACE}-{SPAN}-01-what-a-later-version-has"], True),
        ([f"cc-{TRACE}-{SPAN}-01"], True),
    ],
)
def test_a_trusted_trace_goes_on(traceparents: Sequence[str], sampled: bool) -> None:
    trace = sampler().begin(traceparents, believed=True)
    assert (trace.trace_id, trace.parent_id, trace.sampled, trace.linked) == (TRACE, SPAN, sampled, None)
    assert len(trace.span_id) == 16
    assert trace.span_id != SPAN
    assert trace.traceparent("b" * 16) == f"00-{TRACE}-{'b' * 16}-0{int(sampled)}"
    assert "tracestate" not in trace.replaced


@pytest.mark.parametrize(
    "traceparents",
    [
        [],
        [""],
        [PARENT, PARENT],
        [PARENT.upper()],
        [PARENT + "-"],
        [PARENT + " "],
        [PARENT[:-1]],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE}-{SPAN}-0g"],
        [f"cc-{TRACE}-{SPAN}-01x"],
        [f"00-{TRACE}-{SPAN}-01\N{FULLWIDTH DIGIT ONE}"],
    ],
)
def test_invalid_context_is_ignored(traceparents: Sequence[str]) -> None:
    trace = sampler().begin(traceparents, believed=True)
    assert trace.trace_id != TRACE
    assert (trace.parent_id, trace.sampled, trace.linked) == ("", False, None)
    assert "tracestate" in trace.replaced


def test_a_stranger_is_linked_and_decides_nothing() -> None:
    trace = sampler("parentbased_always_off").begin([PARENT], believed=False)
    assert (trace.parent_id, trace.sampled, trace.linked) == ("", False, (TRACE, SPAN))
    assert trace.trace_id != TRACE
    assert "tracestate" in trace.replaced
    assert sampler("always_on").begin([PARENT[:-1] + "0"], believed=False).sampled


@pytest.mark.parametrize(("argument", "share"), [("", RATIO), ("0.25", 0.25), ("0", 0.0), ("1", 1.0), ("1e-9", 0.0)])
def test_a_share_of_the_traces_is_sampled(argument: str, share: float) -> None:
    chosen = sampler("parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG=argument)
    picked = sum(chosen.begin([], believed=True).sampled for _ in range(4_000))
    assert picked == pytest.approx(4_000 * share, abs=150)
    by_id = sampler("traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    for end in ("0" * 15 + "1", "7" + "f" * 15, "8" + "0" * 15, "f" * 16):
        trace = by_id.begin([f"00-{TRACE[:16]}{end}-{SPAN}-00"], believed=True)
        assert trace.sampled == (end < "8"), "every process picks the same traces"


def test_tracing_is_off_by_default_and_by_the_standard_variable() -> None:
    assert Sampler.of(Config(), {}) is None
    assert Sampler.of(TRACED, {"OTEL_SDK_DISABLED": " True "}) is None
    assert Sampler.of(TRACED, {"OTEL_SDK_DISABLED": "false"}) is not None


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER is 'jaeger_remote'; known are always_on"),
        ({"OTEL_TRACES_SAMPLER_ARG": "10%"}, "OTEL_TRACES_SAMPLER_ARG is '10%'; it should be a number from 0 to 1"),
        ({"OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG is '2'"),
        ({"OTEL_TRACES_SAMPLER_ARG": "nan"}, "OTEL_TRACES_SAMPLER_ARG is 'nan'"),
    ],
)
def test_a_sampler_that_is_unknown_is_an_error_of_the_configuration(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match="tracing") as raised:
        Sampler.of(TRACED, variables)
    assert problem in str(raised.value)
