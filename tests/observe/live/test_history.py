"""The history keeps a quarter of an hour by the second and a day by ten seconds, and a gap stays a gap."""

from __future__ import annotations

from array import array
from math import isnan, nan

from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.observe.live.history import COLUMNS_MAX, READ_BYTES_MAX, SECONDS, TEN_S, TENS, History, Stretch
from llmproxy.remote.cluster.pages import PAGE_BYTES_MAX


def column(stretch: Stretch, name: str) -> list[float]:
    values = array("f")
    values.frombytes(stretch.values)
    if name not in stretch.names:
        return [nan] * stretch.rows
    at = stretch.names.index(name)
    return list(values[at * stretch.rows : (at + 1) * stretch.rows])


def filled(seconds: range, history: History | None = None) -> History:
    history = history or History(worst=("state",))
    for second in seconds:
        history.append(second, {"a/x": float(second % 1_000), "b/state": float(second % 10)})
    return history


def test_a_column_goes_out_as_it_came_in() -> None:
    stretch = filled(range(100, 160)).read(["a/"], 30)
    assert (stretch.names, stretch.from_s, stretch.step_s, stretch.rows) == (("a/x",), 130, 1, 30)
    assert column(stretch, "a/x") == [float(second) for second in range(130, 160)]


def test_before_the_first_row_there_is_nothing() -> None:
    assert History().read([""], 900).rows == 0
    assert History().last_s == -1
    assert History().latest() == {}
    stretch = filled(range(100, 103)).read([""], 900)
    assert (stretch.from_s, stretch.rows) == (100, 3)


def test_the_ring_goes_round() -> None:
    history = filled(range(SECONDS + 250))
    stretch = history.read(["a/"], SECONDS)
    assert (stretch.from_s, stretch.rows) == (250, SECONDS)
    assert column(stretch, "a/x") == [float(second % 1_000) for second in range(250, SECONDS + 250)]


def test_ten_seconds_keep_the_mean_or_the_worst() -> None:
    stretch = filled(range(1_000, 2_005)).read([""], SECONDS + 1)
    assert (stretch.step_s, stretch.from_s, stretch.rows) == (TEN_S, 1_100, 90)
    assert column(stretch, "b/state") == [9.0] * 90
    assert column(stretch, "a/x")[:2] == [104.5, 114.5]


def test_a_value_that_was_missing_is_missing() -> None:
    history = History()
    history.append(10, {"x": 1.0})
    history.append(11, {})
    history.append(14, {"x": 4.0})
    values = column(history.read([""], 5), "x")
    assert values[0] == 1.0
    assert values[-1] == 4.0
    assert all(isnan(value) for value in values[1:-1])
    assert history.latest()["x"] == 4.0


def test_a_row_of_the_past_is_ignored() -> None:
    history = filled(range(10, 20))
    history.append(15, {"a/x": 99.0})
    history.append(19, {"a/x": 99.0})
    assert column(history.read(["a/"], 10), "a/x") == [float(second) for second in range(10, 20)]


def test_paused_process_shows_a_gap() -> None:
    history = filled(range(2_000))
    history.append(50_005, {"a/x": 1.0})
    by_second = column(history.read(["a/"], SECONDS), "a/x")
    assert [value for value in by_second if not isnan(value)] == [1.0]
    by_ten = history.read(["a/"], TENS * TEN_S)
    assert by_ten.from_s == 0
    assert by_ten.rows == 5_000
    values = column(by_ten, "a/x")
    assert [ten for ten, value in enumerate(values) if not isnan(value)] == list(range(200))


def test_gap_of_more_than_a_day_is_shown() -> None:
    history = filled(range(2_000))
    history.append(500_005, {"a/x": 1.0})
    values = column(history.read(["a/"], TENS * TEN_S), "a/x")
    assert len(values) == TENS
    assert all(isnan(value) for value in values)


def test_columns_are_bounded_and_the_longest_idle_make_room() -> None:
    history = History()
    history.append(0, {f"old/{i}": 1.0 for i in range(COLUMNS_MAX)})
    history.append(1, {f"old/{i}": 1.0 for i in range(2, COLUMNS_MAX)})
    history.append(2, {"new/0": 1.0, "new/1": 1.0} | {f"old/{i}": 1.0 for i in range(3, COLUMNS_MAX)})
    assert len(history.names) == COLUMNS_MAX
    assert {"new/0", "new/1", "old/2"} <= set(history.names)
    history.append(3, {f"newest/{i}": 1.0 for i in range(2)} | {name: 1.0 for name in history.names if name != "old/2"})
    assert len(history.names) == COLUMNS_MAX
    assert {"newest/0"} == {name for name in history.names if name.startswith("newest/")}


def test_flows_that_come_and_go_push_out_nothing_else() -> None:
    history = History(fleeting=("flow/",))
    history.append(0, {"band/idle": 1.0})
    for second in range(1, COLUMNS_MAX + 100):
        history.append(second, {f"flow/{second}": 1.0})
    history.append(COLUMNS_MAX + 100, {"backend/new": 1.0})
    assert {"band/idle", "backend/new"} <= set(history.names)


def test_history_takes_the_documented_memory() -> None:
    history = History()
    history.append(0, {f"c/{i}": 1.0 for i in range(COLUMNS_MAX)})
    size = sum(memoryview(one.seconds).nbytes + memoryview(one.tens).nbytes for one in history._columns.values())
    assert size == COLUMNS_MAX * (SECONDS + TENS) * 4
    assert f"{size / 1e6:.1f} MB" == "21.4 MB"


@example([1, SECONDS + 2], SECONDS + 1)
@given(st.lists(st.integers(1, 2_500), min_size=1, max_size=25), st.integers(1, 2_000))
def test_history_equals_a_list_of_rows(gaps: list[int], span_s: int) -> None:
    history, rows, second = History(), {}, 0
    for value, gap in enumerate(gaps):
        second += gap
        rows[second] = float(value)
        history.append(second, {"x": float(value)})
    stretch = history.read([""], span_s)
    found = column(stretch, "x")
    first = min(rows)
    if stretch.step_s == 1:
        wanted = [rows.get(at, nan) for at in range(max(first, second - span_s + 1), second + 1)]
    else:
        tens = range(max((first) // TEN_S, (second + 1) // TEN_S - span_s // TEN_S), (second + 1) // TEN_S)
        wanted = []
        for ten in tens:
            values = [rows[at] for at in range(ten * TEN_S, ten * TEN_S + TEN_S) if at in rows]
            wanted.append(sum(values) / len(values) if values else nan)
    assert [str(value) for value in found] == [str(value) for value in array("f", wanted)]


def test_a_day_of_many_columns_fits_into_an_answer_with_the_largest_sums() -> None:
    history = History(fleeting=("flow/",))
    history.append(TENS * TEN_S - 60, {"old/x": 1.0})
    begun = TENS * TEN_S
    for second in range(begun, begun + 4 * TEN_S):
        history.append(second, {"fleet/x": 0.0} | {f"flow/{number}/tokens": float(number) for number in range(500)})
    history.append(begun + TENS * TEN_S - 4 * TEN_S, {"fleet/x": 0.0})
    day = history.read(["flow/", "fleet/", "old/"], TENS * TEN_S)
    assert (day.names[0], day.names[1], "old/x" in day.names) == ("fleet/x", "flow/499/tokens", False)
    assert len(day.values) == len(day.names) * day.rows * 4 <= READ_BYTES_MAX < PAGE_BYTES_MAX
    assert len(day.names) > 200
