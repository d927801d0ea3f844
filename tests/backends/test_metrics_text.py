"""Every page of metrics becomes a reading, None, or an error with a reason for people."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.backends.metrics_text import LABELS_BYTES_MAX, METRIC_NAMES, is_filtered, parse_reading
from llmproxy.core.domain import Reading
from llmproxy.gateway.request.json_scan import drain

ENGINE = b'{engine="0",model_name="tiny"}'
# The shape of a recorded page, the series around the needed ones included.
PAGE = b"""# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 8.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
# HELP vllm:num_requests_waiting_by_reason Sum of all reasons equals vllm:num_requests_waiting.
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.06457925636007833
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7952257846326966e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="lora-1,lora-2",waiting_lora_adapters="lora-1"} 1.7952258846e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="lora-0",waiting_lora_adapters="lora-0"} 1.7952257871704404e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",engine="0",kv_cache_size_tokens="16384",num_cpu_blocks="None",num_gpu_blocks="512",user_specified_block_size="True"} 1.0
"""  # noqa: E501 - recorded lines
EXPECTED = Reading(
    taken_at_s=7.0, running=8, waiting=4, kv_used=0.06457925636007833, kv_tokens=16384,
    running_adapters=frozenset({"lora-1", "lora-2"}), max_adapters=2, deferred=1,
)  # fmt: skip


def reading(*lines: bytes) -> Reading:
    found = drain(parse_reading(b"vllm:num_requests_running 0\n" + b"\n".join(lines), 0.0))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        pytest.param(PAGE, EXPECTED, id="as recorded"),
        pytest.param(PAGE.replace(b"\n", b"\r\n").rstrip(), EXPECTED, id="Windows line ends and none at the last line"),
        pytest.param(
            b"vllm:num_requests_waiting 2", Reading(taken_at_s=7.0, waiting=2), id="begins with a needed line"
        ),
        pytest.param(b"vllm:kv_cache_usage_perc 0.5\n", None, id="its KV use alone does not make an engine idle"),
        *((page, None) for page in (b"", b"\n", b"<html></html>", b"process_cpu_seconds_total 3.0\n")),
    ],
)
def test_a_page_with_vllm_series_is_a_reading(page: bytes, expected: Reading | None) -> None:
    assert drain(parse_reading(page, 7.0)) == expected


def test_engines_behind_one_page_are_summed_and_averaged() -> None:
    found = reading(
        b'vllm:num_requests_running{engine="0"} 3',
        b'vllm:num_requests_running{engine="1"} 4',
        b'vllm:num_requests_waiting{engine="0"} 1',
        b'vllm:num_requests_waiting{engine="1"} 1',
        b'vllm:kv_cache_usage_perc{engine="0"} 0.2',
        b'vllm:kv_cache_usage_perc{engine="1"} 0.4',
        b'vllm:cache_config_info{engine="0",kv_cache_size_tokens="100"} 1',
        b'vllm:cache_config_info{engine="1",kv_cache_size_tokens="200"} 1',
        b'vllm:generation_tokens_total{engine="0"} 5',
        b'vllm:generation_tokens_total{engine="1"} 6',
    )
    assert (found.generated, found.engines) == (11, 2)
    assert (found.running, found.waiting, found.kv_tokens) == (7, 2, 300)
    assert found.kv_used == pytest.approx(0.3)


@pytest.mark.parametrize("prefix", [b"ray_vllm_", b"vllm_"])
def test_names_with_another_prefix_are_read_as_vllm_names(prefix: bytes) -> None:
    assert drain(parse_reading(PAGE.replace(b"vllm:", prefix), 7.0)) == EXPECTED


def test_names_of_sglang_are_read() -> None:
    page = b'sglang:num_running_reqs{a="b"} 3\nsglang:num_running_reqs_offline 9\nsglang:num_queue_reqs 2\n'
    found = drain(parse_reading(page + b"sglang:token_usage 0.4\n", 7.0))
    assert found == Reading(taken_at_s=7.0, running=3, waiting=2, kv_used=0.4)


def test_the_old_name_of_kv_use_counts_where_the_new_one_is_absent() -> None:
    assert reading(b"vllm:gpu_cache_usage_perc 0.5").kv_used == 0.5
    assert reading(b"vllm:gpu_cache_usage_perc 0.5", b"vllm:kv_cache_usage_perc 0.25").kv_used == 0.25


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (b'block_size="16",num_gpu_blocks="1000"', 16000),
        (b'block_size="16",num_gpu_blocks="1000",kv_cache_size_tokens="None"', 16000),
        (b'block_size="16",num_gpu_blocks="None"', None),
        (b'user_specified_block_size="16",num_gpu_blocks="1000"', None),
        (b'note="a \\"block_size=\\\\\\" } b",block_size="2",num_gpu_blocks="3"', 6),
        (b"", None),
    ],
)
def test_kv_tokens_come_from_the_cache_configuration(labels: bytes, tokens: int | None) -> None:
    assert reading(b"vllm:cache_config_info{" + labels + b"} 1.0").kv_tokens == tokens


def test_escaped_label_values_are_read_as_written() -> None:
    found = reading(rb'vllm:lora_requests_info{max_lora="None",running_lora_adapters="a\"b, c\\nd ,,e} 9"} 1.7e9')
    assert found.running_adapters == frozenset({'a"b', "c\\nd", "e} 9"})
    assert found.max_adapters is None


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-1", b"1e300", b"None", b"", b"0x10", b"{"])
def test_an_unusable_value_counts_as_missing(value: bytes) -> None:
    assert drain(parse_reading(b"vllm:num_requests_running" + ENGINE + b" " + value + b"\n", 0.0)) is None
    assert reading(b"vllm:kv_cache_usage_perc" + ENGINE + b" " + value).kv_used is None


@pytest.mark.parametrize("value", [b"12", b"12.0", b"1.2e+01", b"12.0 1795225884626", b" 12.0 \r"])
def test_a_value_may_be_written_in_several_ways(value: bytes) -> None:
    assert reading(b"vllm:num_requests_running" + ENGINE + b" " + value).running == 12


def test_kv_use_above_one_is_one() -> None:
    assert reading(b"vllm:kv_cache_usage_perc 1.25").kv_used == 1.0


def test_a_metric_name_with_a_needed_prefix_is_another_metric() -> None:
    found = reading(
        b"vllm:num_requests_running_total 5", b"my_vllm:num_requests_running 5", b"vllm:num_requests_running"
    )
    assert found.running == 0


def test_a_filtered_page_is_distinguished_from_a_full_one() -> None:
    assert not is_filtered(PAGE)
    others = (b"python", b"vllm:num_requests_waiting_by")
    wanted = b"".join(line for line in PAGE.splitlines(keepends=True) if not line.startswith(others))
    assert is_filtered(wanted)
    assert is_filtered(wanted.replace(b"\n", b"\r\n") + b"\r\n\r\n")


SNIPPETS = st.sampled_from(
    [name.encode() for name in METRIC_NAMES]
    + [b"\n", b"\r\n", b" ", b"\xff\x00", *rb'{ } " \ , = 1 1.7e9 NaN # max_lora=" block_size="3"'.split()]
)


@given(st.one_of(st.binary(), st.lists(SNIPPETS, max_size=60).map(b"".join)))
@example(b"vllm:num_requests_running\n")
@example(b'vllm:lora_requests_info{running_lora_adapters="\xff"} 1\nvllm:num_requests_running 1')
def test_no_page_makes_it_fail(page: bytes) -> None:
    found = drain(parse_reading(page, 1.0))
    is_filtered(page)
    if found is not None:
        assert found.running >= 0
        assert found.waiting >= 0
        assert found.kv_used is None or 0 <= found.kv_used <= 1
        assert found.kv_tokens is None or found.kv_tokens >= 0


# Quadratic time would be minutes here: the limit does not depend on the speed of the machine.
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "page",
    [
        b"vllm:num_requests_running\n" * 40_000,
        b"vllm:cache_config_info{" + b"a" * 1_000_000 + b"} 1\nvllm:num_requests_running 1\n",
        b"vllm:cache_config_info{" + b'a="' * 300_000 + b"} 1\nvllm:num_requests_running 1\n",
        b"\n" * 1_000_000,
        b" " * 1_000_000,
    ],
    ids=["names", "long label name", "open quotes", "empty lines", "blanks"],
)
def test_a_hostile_page_takes_linear_time(page: bytes) -> None:
    with suppress(ValueError):
        drain(parse_reading(page, 0.0))
    is_filtered(page)


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running 1\n",
        b"vllm:num_requests_running",
        b'vllm:lora_requests_info{running_lora_adapters="a"} 1\n',
        b'vllm:cache_config_info{block_size="16"} 1\n',
    ],
)
def test_a_large_page_is_read_in_slices(line: bytes) -> None:
    assert sum(1 for _ in parse_reading(b"vllm:num_requests_running 1\n" + line * 25_600, 0.0)) >= 100


def test_a_series_with_too_many_labels_is_refused() -> None:
    page = b"vllm:num_requests_running 1\nvllm:cache_config_info{" + b'a="",' * LABELS_BYTES_MAX + b"} 1\n"
    with pytest.raises(ValueError, match=f"more than the {LABELS_BYTES_MAX}"):
        drain(parse_reading(page, 0.0))


def test_a_large_page_is_judged_by_its_beginning() -> None:
    asked = b"vllm:num_requests_running 1\n" * 10_000
    assert is_filtered(asked)
    assert not is_filtered(b"python_gc_objects_collected_total 1\n" + asked)
