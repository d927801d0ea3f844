"""`result.json`, its schema, and the table made of it."""

from __future__ import annotations

import io
import math
from random import Random
from typing import Literal

import orjson
import pytest
from pydantic import ValidationError
from rich.console import Console

from llmproxy.lab.results.result import (
    Bound,
    RunResult,
    SimulationResult,
    load_label,
    load_points,
    policies_of,
    schema_bytes,
    to_bytes,
)
from llmproxy.lab.results.table import ORACLE_NOTE, milliseconds, print_tables, seconds
from tests import ROOT
from tests.lab.invented import TWELVE, invented, invented_run

SCHEMA = ROOT / "docs" / "laboratory" / "simulate-result.schema.json"


def printed(result: SimulationResult, *, terminal: bool = False) -> str:
    out = io.StringIO()
    color_system: Literal["standard", "auto"] = "standard" if terminal else "auto"
    # The tester's own terminal must not decide.
    environ = {"TERM": "xterm-256color"}
    print_tables(
        result, Console(file=out, width=80, force_terminal=terminal, color_system=color_system, _environ=environ)
    )
    return out.getvalue()


def run_of(policy: str = "blend", **changes: object) -> RunResult:
    return invented_run(policy, 1.0, count=50).model_copy(update=changes)


# --- result.json ------------------------------------------------------------------------------------------------------


def test_the_published_schema_is_that_of_the_models() -> None:
    hint = "run: python -m llmproxy.lab.results.result > docs/laboratory/simulate-result.schema.json"
    assert SCHEMA.read_bytes() == schema_bytes(), hint


def test_a_run_has_every_field_that_readers_were_promised() -> None:
    tree = orjson.loads(to_bytes(invented(("blend",), (1.0,), count=50)))
    assert tree["format"] == "llmproxy-simulate/1"
    assert set(tree) == {"format", "runs", "bounds", "config"}
    promised = (
        "policy seed rate_scale prefill_scale offered completed refused goodput ttft_s tpot_s hit_tokens_ratio "
        "prefill_imbalance by_band by_tenant by_backend"
    )
    assert set(promised.split()) <= set(tree["runs"][0])
    assert {"p50", "p99"} <= set(tree["runs"][0]["ttft_s"])


def test_equal_results_give_equal_bytes_in_whatever_order_they_came() -> None:
    result = invented(("random", "blend", "oracle"), (0.7, 1.5), seeds=2, count=40)
    shuffled = list(result.runs)
    Random(5).shuffle(shuffled)
    other = SimulationResult(
        runs=shuffled,
        bounds=result.bounds,
        config=dict(reversed(result.config.items())),
    )
    assert shuffled != result.runs
    assert to_bytes(other) == to_bytes(result)


def test_bounds_stay_in_the_order_in_which_they_should_be_shown() -> None:
    bound = Bound(value=None, unit="s", about="why")
    written = to_bytes(SimulationResult(runs=[], bounds={"load": {"z": bound, "a": bound}}))
    assert written.index(b'"z"') < written.index(b'"a"')


def test_mappings_within_the_configuration_are_sorted_too() -> None:
    first = SimulationResult(runs=[], config={"scheduling": {"b": [{"y": 1, "x": 2}], "a": 1}})
    second = SimulationResult(runs=[], config={"scheduling": {"a": 1, "b": [{"x": 2, "y": 1}]}})
    assert to_bytes(first) == to_bytes(second)


def test_figures_have_six_digits_and_counts_all_of_theirs() -> None:
    written = to_bytes(SimulationResult(runs=[run_of(goodput=1 / 3, offered=123_456_789)]))
    assert b'"goodput": 0.333333,' in written
    assert b'"offered": 123456789,' in written
    assert written.endswith(b"}\n")


def test_what_was_written_can_be_read_and_written_again() -> None:
    written = to_bytes(invented(("blend", "random"), (1.0,), count=40))
    assert to_bytes(SimulationResult.model_validate_json(written)) == written


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_figure_that_json_cannot_say_is_an_error_that_names_it(value: float) -> None:
    with pytest.raises(ValueError, match=r"runs\.0\.goodput is (inf|nan)"):
        to_bytes(SimulationResult(runs=[run_of(goodput=value)]))


def test_an_unknown_field_is_not_overlooked() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        SimulationResult.model_validate({"runs": [], "run": []})


# --- averaged over seeds ----------------------------------------------------------------------------------------------


def test_rows_are_means_over_the_seeds_that_have_the_figure() -> None:
    runs = [
        run_of(seed=1, goodput=0.5, prefill_imbalance=None, offered=10, refused=1),
        run_of(seed=2, goodput=0.7, prefill_imbalance=2.0, offered=10, refused=2),
    ]
    [point] = load_points(SimulationResult(runs=runs))
    [row] = point.rows
    assert (row.seeds, row.goodput, row.goodput_range, row.imbalance) == (2, 0.6, (0.5, 0.7), 2.0)
    assert row.refused == pytest.approx(0.15)


def test_loads_come_lighter_first_and_yardsticks_last() -> None:
    runs = [
        run_of(policy, rate_scale=rate, prefill_scale=prefill)
        for policy in ("oracle", "random", "blend")
        for rate, prefill in ((2.0, 1.0), (1.0, 1.9), (1.0, 1.0))
    ]
    result = SimulationResult(runs=runs)
    points = load_points(result)
    assert [(point.prefill_scale, point.rate_scale) for point in points] == [(1.0, 1.0), (1.0, 2.0), (1.9, 1.0)]
    assert [row.policy for row in points[0].rows] == ["random", "blend", "oracle"] == policies_of(result)


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_is_plain_text_of_80_columns_where_nobody_watches() -> None:
    text = printed(invented(TWELVE, (0.7, 1.5), seeds=2, count=60))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(policy in text for policy in TWELVE)
    assert ORACLE_NOTE in " ".join(text.split())
    assert "…" not in text


def test_the_best_of_each_column_is_bold_and_a_yardstick_never() -> None:
    runs = [run_of("blend", goodput=0.9), run_of("random", goodput=0.4), run_of("oracle", goodput=0.999)]
    text = printed(SimulationResult(runs=runs), terminal=True)
    assert "\x1b[1m90.0%" in text
    assert "\x1b[1m40.0%" not in text
    assert "\x1b[1m99.9%" not in text
    assert "\x1b[1m\x1b[3m99.9%" not in text


def test_what_most_reach_is_not_pointed_at() -> None:
    runs = [run_of(policy, goodput=1.0) for policy in ("blend", "random", "session")]
    assert "\x1b[1m100.0%" not in printed(SimulationResult(runs=runs), terminal=True)


def test_a_run_that_completed_nothing_has_a_row_without_latencies() -> None:
    result = SimulationResult(runs=[invented_run("blend", 1.0, skill=0.0, count=20)])
    [line] = [line for line in printed(result).splitlines() if "blend" in line]
    assert line.split() == ["blend", "0.0%", "-", "-", "-", "-", "-", "-", "-", "100.0%", "0.0%"]


def test_bounds_of_all_loads_are_explained_once() -> None:
    rates = tuple(float(rate) for rate in range(1, 8))
    text = printed(invented(("blend",), rates, count=10))
    values = [line.split() for line in text.splitlines() if line.split()[:2] == ["hit_pooled_lru", "share"]]
    assert values == [["hit_pooled_lru", "share", *["0.331"] * 5], ["hit_pooled_lru", "share", *["0.331"] * 2]]
    assert text.count("One cache as large") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_a_bound_that_one_load_lacks_is_not_made_up() -> None:
    result = invented(("blend",), (1.0, 2.0), count=10)
    label = load_label(1.0, 1.0)
    with_one = result.model_copy(update={"bounds": {label: {"odd": Bound(value=12_345.0, unit="tokens", about="why")}}})
    assert ["odd", "tokens", "12,345"] in [line.split() for line in printed(with_one).splitlines()]


def test_no_run_at_all_is_said() -> None:
    assert printed(SimulationResult(runs=[])) == "Nothing was run.\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0.0314, "0.031"), (0.9996, "1.00"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1234")],
)
def test_seconds_keep_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_time_per_token_is_shown_in_milliseconds() -> None:
    assert (milliseconds(0.01234), milliseconds(0.1234)) == ("12.3", "123")
