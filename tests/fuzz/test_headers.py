"""Only allowed header fields reach a backend, and none makes the proxy fail."""

from __future__ import annotations

import re
from math import isnan
from types import SimpleNamespace
from typing import cast

from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict
from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from llmproxy.config import BackendConfig, Config, hash_of
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.headers import PRIVILEGED, named_in_connection, to_client
from llmproxy.gateway.request.auth import Keys
from llmproxy.gateway.request.identity import Identity, id_for_error, parse_duration_s, request_id
from llmproxy.observe.trace_context import Sampler
from tests.exits import exit_of
from tests.fuzz.profile import FUZZED

NAMES = st.sampled_from(
    [
        "Connection", "connection", "Authorization", "X-Api-Key", "Cookie", "Host", "Content-Length", "TE", "Upgrade",
        "Transfer-Encoding", "x-request-id", "X-Foo", "Keep-Alive", "x-llm-d-inference-ttl", "x-slo-ttft-ms",
    ]
    + [name.title() for name in sorted(PRIVILEGED)]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ["close", "X-Foo, authorization", "bearer k", "Bearer  k ", "1s", "1h2m", "chunked", "5", "critical"]
    ),
    st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0xFF), max_size=12),
    st.binary(max_size=8).map(
        lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"").decode("utf-8", "surrogateescape")
    ),
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=8)
NEVER = {"connection", "te", "upgrade", "transfer-encoding", "keep-alive", "host", "content-length"}
CONFIG = Config.model_validate({"tenants": [{"name": "a", "keys": [hash_of("k")]}], "trust_headers": "none"})
BACKEND = BackendConfig(url="http://a", api_key="engine")


def request(fields: list[tuple[str, str]]) -> web.BaseRequest:
    """The part of a request that is used here. A real request cannot have fields that are no UTF-8."""
    return cast(web.BaseRequest, SimpleNamespace(headers=CIMultiDict(fields), remote="10.0.0.1"))


@FUZZED
@given(FIELDS)
def test_a_backend_gets_only_allowed_fields(fields: list[tuple[str, str]]) -> None:
    sent = Identity(CONFIG).backend_headers(request(fields), "own-id", BACKEND)
    names = [name.lower() for name, _ in sent]
    assert not set(names) & (NEVER | PRIVILEGED | {"x-api-key"})
    assert not set(names) & (named_in_connection(fields) - {"authorization", "x-request-id"})
    assert [value for name, value in sent if name.lower() == "authorization"] == ["Bearer engine"]
    assert [value for name, value in sent if name.lower() == "x-request-id"] == ["own-id"]
    assert [field for field in sent if field in fields] == [field for field in fields if field in sent]


@FUZZED
@given(FIELDS)
def test_every_field_for_a_client_can_be_encoded(fields: list[tuple[str, str]]) -> None:
    for name, value in to_client(fields):
        assert name.lower() not in {"connection", "te", "upgrade", "transfer-encoding", "keep-alive"}
        assert isinstance(value.encode(), bytes)


@FUZZED
@given(FIELDS)
def test_no_field_raises_anything_but_a_failure(fields: list[tuple[str, str]]) -> None:
    headers = CIMultiDict(fields)
    identity, keys = Identity(CONFIG), Keys(CONFIG)
    record = exit_of(request_id="r", method="POST", path="/")
    for act in (
        lambda: keys.check(headers),
        lambda: identity.classify(record, headers, True, "m", "m"),
        lambda: request_id(headers),
        lambda: identity.session(request(fields), {}),
    ):
        try:
            act()
        except Failure as failure:
            assert 400 <= failure.status < 500
            assert failure.message
    assert id_for_error(headers).isprintable()


@FUZZED
@given(st.text(alphabet="0123456789.hmsuµn +-e", max_size=10) | st.text(max_size=5))
@example("9" * 400 + "h")
@example("٣s")
def test_a_duration_is_a_number_or_none(text: str) -> None:
    found = parse_duration_s(text)
    assert found is None or (not isnan(found) and found >= 0)


TRACE_PIECES = st.sampled_from(
    ["00", "ff", "01", "0" * 32, "a" * 32, "0" * 16, "b" * 16, "-", "--", "01-x", "G", " ", "\xe9"]
)
TRACEPARENTS = st.lists(
    st.one_of(
        st.lists(TRACE_PIECES, max_size=8).map("-".join),
        st.lists(TRACE_PIECES, max_size=8).map("".join),
        VALUES,
        st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?", fullmatch=True),
    ),
    max_size=3,
)
VALID = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]", re.ASCII)


@FUZZED
@given(TRACEPARENTS, st.booleans())
def test_backend_gets_one_valid_trace_field(given: list[str], believed: bool) -> None:
    sampler = Sampler.of(Config(tracing=True), {"OTEL_TRACES_SAMPLER": "parentbased_always_off"})
    assert sampler is not None
    trace = sampler.begin(given, believed)
    fields = [("traceparent", one) for one in given] + [("tracestate", "v=1")]
    sent = Identity(CONFIG).backend_headers(request(fields), "own-id", BACKEND, trace=trace, span_id="c" * 16)
    [parent] = [value for name, value in sent if name == "traceparent"]
    assert VALID.fullmatch(parent)
    goes_on = any(trace.trace_id in one for one in given)
    assert (("tracestate", "v=1") in sent) == goes_on
    if not believed:
        assert not goes_on
        assert not trace.sampled
    elif len(given) == 1 and given[0].startswith("00"):
        # As the library reads it, which knows no version but this one exactly.
        known = TraceContextTextMapPropagator().extract({"traceparent": given[0]}, Context())
        parent_span = trace_api.get_current_span(known).get_span_context()
        assert goes_on == parent_span.is_valid
        if goes_on:
            assert (trace.sampled, int(trace.parent_id, 16)) == (parent_span.trace_flags.sampled, parent_span.span_id)
