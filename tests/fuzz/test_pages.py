"""Metrics pages of a Prometheus client are read as a Prometheus parser reads them."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from llmproxy.backends.metrics_text import METRIC_NAMES, is_filtered, parse_reading
from llmproxy.backends.models import parse_listing
from llmproxy.gateway.request.json_scan import drain
from tests.fuzz.profile import FUZZED

LABELS = st.text(alphabet=st.sampled_from('ab"\\{},=\n 1é'), max_size=12)
VALUES = st.floats() | st.integers(-1, 2**60)
SERIES = st.lists(st.tuples(st.sampled_from([*METRIC_NAMES[:4], "vllm:num_requests_running_by", "x"]), LABELS, VALUES))
ADAPTERS = st.lists(st.tuples(LABELS, st.sampled_from(["0", "4", "None", "x"]), st.floats(-1, 2e9)), max_size=4)


def page_of(series: list[tuple[str, str, float]], adapters: list[tuple[str, str, float]]) -> bytes:
    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    for name, label, value in series:
        if name not in gauges:
            gauges[name] = Gauge(name, 'Says "so".\nTwice.', ["engine"], registry=registry)
        gauges[name].labels(label).set(value)
    info = Gauge(METRIC_NAMES[5], "x", ["running_lora_adapters", "max_lora"], registry=registry)
    for names, max_lora, at_s in adapters:
        info.labels(names, max_lora).set(at_s)
    return generate_latest(registry)


@FUZZED
@given(SERIES, ADAPTERS)
def test_a_page_is_read_as_a_parser_reads_it(
    series: list[tuple[str, str, float]], adapters: list[tuple[str, str, float]]
) -> None:
    page = page_of(series, adapters)
    found = drain(parse_reading(page, 1.0))
    samples = [one for family in text_string_to_metric_families(page.decode()) for one in family.samples]

    def usable(name: str) -> list[float]:
        return [one.value for one in samples if one.name == name and 0 <= one.value <= 1e15]

    running, waiting = usable(METRIC_NAMES[0]), usable(METRIC_NAMES[1])
    if not running and not waiting:
        assert found is None
        return
    assert found is not None
    assert (found.running, found.waiting) == (round(sum(running)), round(sum(waiting)))
    kv_used = usable(METRIC_NAMES[2]) or usable(METRIC_NAMES[3])
    assert (found.kv_used is None) == (not kv_used)
    newest = max(
        (one for one in samples if one.name == METRIC_NAMES[5] and one.value >= 0),
        key=lambda one: one.value,
        default=None,
    )
    names = newest.labels["running_lora_adapters"].split(",") if newest is not None else []
    assert found.running_adapters == {name.strip() for name in names if name.strip()}
    assert is_filtered(page) == all(one.name in METRIC_NAMES for one in samples)


@FUZZED
@given(SERIES, ADAPTERS, st.lists(st.tuples(st.integers(0, 900), st.integers(0, 9), st.binary(max_size=4)), max_size=4))
def test_no_page_raises(
    series: list[tuple[str, str, float]], adapters: list[tuple[str, str, float]], cuts: list[tuple[int, int, bytes]]
) -> None:
    page = page_of(series, adapters)
    for at, gone, new in cuts:
        page = page[:at] + new + page[at + gone :]
    found = drain(parse_reading(page, 1.0))
    is_filtered(page)
    assert found is None or min(found.running, found.waiting) >= 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**60) | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "parent", "max_model_len", "x"]), inner)
    ),
    max_leaves=8,
)


@FUZZED
@given(
    st.lists(JSON | st.dictionaries(st.sampled_from(["id", "parent", "max_model_len"]), JSON), max_size=4),
    st.binary(max_size=5),
)
def test_a_model_list_is_read_whole_or_refused_with_a_reason(cards: list[Any], junk: bytes) -> None:
    body = orjson.dumps({"data": cards})
    try:
        listing = drain(parse_listing(body, 1.0))
    except ValueError as error:
        assert str(error)
    else:
        assert [dict(card.fields) for card in listing.cards] == cards
    try:
        drain(parse_listing(body[: len(body) // 2] + junk, 1.0))
    except ValueError as error:
        assert str(error)
