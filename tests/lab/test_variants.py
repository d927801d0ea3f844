"""Runs of a trace on several fleets, and their tables and advice."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import Autoscale, Fault, FleetFaultKind
from llmproxy.lab.results.fleet_tables import Size, Sizes, print_sizes, sizes_of
from llmproxy.lab.results.objectives import Wanted
from llmproxy.lab.variants import fleets, resized
from tests.lab.invented import invented_run

MIXED = fleet_named("2xllama-8b-h100+1xllama-8b-a100")


def test_a_larger_fleet_has_all_kinds_again_in_turn() -> None:
    grown = resized(MIXED, 12)
    assert [one.profile_name for one in grown.replicas[:6]] == 2 * ["llama-8b-h100", "llama-8b-h100", "llama-8b-a100"]
    assert [one.name for one in grown.replicas] == sorted({f"gpu-{i:02}" for i in range(12)})
    assert [one.profile_name for one in resized(MIXED, 1).replicas] == ["llama-8b-h100"]


@pytest.mark.parametrize(
    ("sizes", "counts"), [("2..5", [2, 3, 4, 5]), ("8, 2,2", [2, 8]), ("3", [3]), (" 1 .. 1 ", [1])]
)
def test_sizes_are_a_range_or_a_list(sizes: str, counts: list[int]) -> None:
    assert [len(one.replicas) for one in fleets(MIXED, (), sizes).values()] == counts


@pytest.mark.parametrize("sizes", ["5..2", "0..3", "a", "1..", "1..100", "9999", "2.5", ""])
def test_sizes_that_mean_nothing_are_refused(sizes: str) -> None:
    with pytest.raises(ValueError, match="--fleet-size"):
        fleets(MIXED, (), sizes)


def test_sizes_go_with_neither_signals_nor_faults() -> None:
    for fleet, scales in (
        (MIXED, ("ours",)),
        (replace(MIXED, autoscale=Autoscale("ours")), ()),
        (replace(MIXED, faults=(Fault(1.0, FleetFaultKind.KILL, "gpu-0"),)), ()),
    ):
        with pytest.raises(ValueError, match="--fleet-size"):
            fleets(fleet, scales, "1..2")


def test_each_signal_is_a_fleet_with_the_bounds_of_the_file() -> None:
    own = replace(MIXED, autoscale=Autoscale("ours", 2, 50.0))
    found = fleets(own, ("hpa_queue", "slo_p90"), None)
    assert {name: one.autoscale for name, one in found.items()} == {
        "hpa_queue": Autoscale("hpa_queue", 2, 50.0),
        "slo_p90": Autoscale("slo_p90", 2, 50.0),
    }
    assert fleets(own, (), None) == {"": own}
    assert list(fleets(own, ("slo_p90",), None)) == [""]
    with pytest.raises(ValueError, match="is no signal"):
        fleets(own, ("oracle",), None)


def test_hours_are_of_the_time_whose_requests_count() -> None:
    run = invented_run("cost", 1.0)
    assert run.goodput is not None
    (found,) = sizes_of([("cost", run.model_copy(update={"duration_s": 5_000.0, "counted_s": 3_600.0}))])
    assert found.rows[0].hours == pytest.approx(1_000 * len(run.by_backend) / (run.goodput * run.offered))


def test_the_table_of_three_bands_fits_80_columns() -> None:
    bands = {"critical": 1.0, "default": 0.987, "sheddable": 0.123}
    printed = StringIO()
    row = Size(12, 0.987, bands, 100.0, 0.1, 0.1234, 12.345)
    print_sizes([Sizes("cost", [row])], Wanted(), Console(file=printed, width=80))
    for text in ("critical", "default", "sheddable", "p99", "hours", "100.0%", "98.7%", "12.3%", "100", "12.345"):
        assert text in printed.getvalue()


def size(replicas: int, kept: float) -> Size:
    return Size(replicas, kept, {}, None, None, 0.0, None)


@pytest.mark.parametrize(
    ("rows", "advice"),
    [
        ([(2, 0.5), (3, 0.96), (4, 1.0)], "3 replicas keep {} for 96.0% of requests. 2 replicas keep it for 50.0%."),
        ([(1, 0.99)], "1 replica keeps {} for 99.0% of requests."),
        ([(2, 0.5), (3, 0.9)], "3 replicas keep {} for 90.0% of requests: not 95.0%."),
    ],
)
def test_the_advice_is_the_smallest_fleet_that_is_enough(rows: list[tuple[int, float]], advice: str) -> None:
    found = Sizes("cost", [size(*row) for row in rows])
    assert found.advice(Wanted(ttft_s=1.0)) == advice.format("1 s to the first token")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ttft=1s", Wanted(1.0, None, 0.95)),
        ("tpot=50ms, ttft=0.5s,share=0.99", Wanted(0.5, 0.05, 0.99)),
        ("share=1", Wanted(None, None, 1.0)),
    ],
)
def test_objectives_are_read(text: str, wanted: Wanted) -> None:
    assert Wanted.parsed(text) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=1", "ttft=0s", "share=2", "share=0", "share=1s", "tbt=1s", "ttft=-1s", "ttft=1m"]
)
def test_objectives_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of|should have"):
        Wanted.parsed(text)
