"""Any bytes from a client get an answer that is no 500, or a closed connection, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.config import hash_of
from llmproxy.gateway.http.routes import LOAD_ADAPTER, SCHEDULED
from tests.e2e.proxies import CHAT, FAST, ProxyUnderTest, serving
from tests.fuzz.profile import FUZZED
from tests.fuzz.rig import entered

METHODS = st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"get", b"P\x00ST", b""])
PATHS = st.one_of(
    st.sampled_from(
        [*SCHEDULED, "/v1/models", "/v1/models/base", "/v1/responses/resp_1/cancel", "/health", "/metrics"]
    ),
    st.sampled_from(
        ["/debug/queue", "/debug/explain?limit=1", "/admin/x", LOAD_ADAPTER, "*", "//", "http://a/v1/models"]
    ),
    st.lists(
        st.sampled_from(
            ["/", "v1", "..", "%2e", "%2F", "%00", "%ff", "%", "?", "#", "models", "responses", "é", ";", "x"]
        )
    ).map(lambda parts: "/" + "".join(parts)),
)
LINES = [
    b"content-type: application/json", b"content-type: multipart/form-data; boundary=cut", b"content-encoding: gzip",
    b"expect: 100-continue", b"authorization: Bearer acme", b"authorization: Bearer \xff", b"x-request-id: \xe9",
    b"x-llm-d-inference-ttl: 1s", b"x-llm-d-inference-ttl: \xff", b"x-llm-d-inference-objective: \xff",
    b"x-llm-d-inference-fairness-id: \xc3\xa9", b"x-slo-ttft-ms: 1e400", b"x-session-id: \xff", b"cookie: a=\xff; b",
    b"x: a\r\n b", b"connection: close", b"transfer-encoding: chunked", b"content-length: 2",
]  # fmt: skip
FIELDS = st.lists(st.sampled_from(LINES) | st.binary(max_size=12).map(lambda raw: b"x: " + raw), max_size=5)
BODIES = st.one_of(
    st.sampled_from([b"", b"{}", b'{"model":"base"}', b'{"model":"\\ud800"}', b'{"model":"base","messages":5}']),
    st.sampled_from(
        [b"2\r\n{}\r\n0\r\n\r\n", b"--cut\r\n\r\n\r\n--cut--", b'{"model":"base","stream":true,"input":"x"}']
    ),
    st.binary(max_size=30),
)


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[asyncio.Runner, ProxyUnderTest]]:
    """A proxy with tenants."""
    tenants = [{"name": "acme", "keys": [hash_of("acme")], "cache_salt": "auto"}]
    settings: dict[str, Any] = {"health": {"failures_before_ejection": 1000}, "queue": {"max_wait_s": 1}}
    with entered(serving(FAST, tenants=tenants, api_keys=["x"], **settings)) as opened:
        yield opened


@FUZZED
@given(METHODS, PATHS, FIELDS, BODIES, st.booleans())
@example(b"POST", CHAT, [b"authorization: Bearer acme", b"content-type: application/json"], b"{}", True)
@example(b"GET", "/v1/models/%ff", [b"authorization: Bearer acme"], b"", True)
def test_no_request_makes_the_proxy_fail(
    rig: tuple[asyncio.Runner, ProxyUnderTest], method: bytes, path: str, fields: list[bytes], body: bytes, framed: bool
) -> None:
    runner, proxy = rig
    if framed:
        # A whole request, which is answered; the others end with the connection, which the client closes on its side.
        fields = [field for field in fields if not field.startswith((b"transfer-encoding", b"content-length"))]
        fields += [b"content-length: %d" % len(body), b"connection: close"]
    head = b"\r\n".join([method + b" " + path.encode() + b" HTTP/1.1", b"host: x", *fields])

    async def asked() -> bytes:
        async with proxy.wire(head + b"\r\n\r\n" + body) as (reader, writer):
            if not framed:
                writer.write_eof()
            return await reader.read()

    answer = runner.run(asked())
    assert not answer.startswith(b"HTTP/1.1 500")
    assert not answer or answer.startswith(b"HTTP/1.")
    runner.run(proxy.settled())
    assert not proxy.outcomes()["internal"]
