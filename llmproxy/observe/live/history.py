"""Time series in memory: a value per second for 15 minutes, and a value per ten seconds for a day.

Each series is a column of 32-bit floats (38 KB), which a browser draws without conversion. NaN means a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from math import nan

from msgspec import Struct

SECONDS = 900  # The number of seconds with a value of their own (15 minutes).
TENS = 8_640  # The number of ten-second values (one day).
TEN_S = 10
COLUMNS_MAX = 560  # The maximum number of columns, which together take 21.4 MB.
READ_BYTES_MAX = 7 << 20
"""The maximum size of the values of a stretch: 212 columns of a day. A cluster member forwards pages of up to 8 MB."""
GAP = array("f", [nan]).tobytes()


class Stretch(Struct, frozen=True):
    """A range of time of several columns.

    Each column has `rows` values, every `step_s` seconds from second `from_s` on.
    """

    names: tuple[str, ...]
    from_s: int
    step_s: int
    rows: int
    values: bytes  # Column after column, as little-endian 32-bit floats.


class _Column:
    __slots__ = ("seconds", "tens", "tens_sum", "written_s")

    def __init__(self) -> None:
        self.seconds = array("f", [nan]) * SECONDS
        self.tens = array("f", [nan]) * TENS
        self.tens_sum = 0.0
        self.written_s = 0

    def put_ten(self, ten: int, value: float) -> None:
        before = self.tens[ten % TENS]
        self.tens[ten % TENS] = value
        # NaN is the only value that differs from itself.
        self.tens_sum += (self.tens[ten % TENS] if value == value else 0.0) - (before if before == before else 0.0)


class History:
    """Maps each second of a monotonic clock to a row of named values.

    Ten seconds become one value for the history of a day: their mean, or their maximum in columns `*/NAME` with a NAME
    in `worst`. If there are too many columns, columns with a prefix in `fleeting` are dropped first.
    """

    def __init__(self, worst: Iterable[str] = (), fleeting: tuple[str, ...] = ()) -> None:
        self._fleeting = fleeting
        self._worst = tuple(f"/{name}" for name in worst)
        self._columns: dict[str, _Column] = {}
        # The second of the newest row; -1 without rows.
        self.last_s = -1
        self._first_s = -1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns."""
        return tuple(self._columns)

    def append(self, second: int, row: Mapping[str, float]) -> None:
        """Adds the row of a second. Does nothing if the row is not newer than the last row."""
        if second <= self.last_s:
            return
        if self.last_s < 0:
            self._first_s = self.last_s = second - 1
        begin = self.last_s + 1
        if second - begin > SECONDS:
            # The process was stopped for longer than the columns of seconds cover.
            self._put_gap(begin, end=(self.last_s // TEN_S + 1) * TEN_S)
            begin = max((second - SECONDS) // TEN_S * TEN_S, self.last_s + 1)
            self._forget_tens(self.last_s // TEN_S + 1, begin // TEN_S)
        self._put_gap(begin, end=second)
        self._make_room(row)
        self._put(second, row)

    def latest(self) -> dict[str, float]:
        """Returns the newest value of each column; NaN if the newest row has no value for it."""
        at = self.last_s % SECONDS
        return {name: column.seconds[at] for name, column in self._columns.items()} if self.last_s >= 0 else {}

    def read(self, prefixes: Iterable[str], span_s: int) -> Stretch:
        """Returns the last `span_s` seconds of each column that has a value there and a name with one of `prefixes`.

        Up to a span of SECONDS, each second has a value. In a longer span, each ten seconds have one value, and
        unfinished ten seconds are left out. Beyond READ_BYTES_MAX, columns with the smallest sums of the day are left
        out, `fleeting` columns first and `worst` columns last.
        """
        wanted = tuple(prefixes)
        by_second = span_s <= SECONDS
        step_s, size = (1, SECONDS) if by_second else (TEN_S, TENS)
        last = self.last_s if by_second else (self.last_s + 1) // TEN_S - 1
        first = max(last - min(span_s // step_s, size) + 1, (self._first_s + 1) // step_s)
        rows = max(0, last - first + 1)
        begin, end = first % size, last % size + 1
        gap, found = GAP * rows, dict[str, bytes]()
        for name, column in self._columns.items() if rows else ():
            if not name.startswith(wanted):
                continue
            ring = column.seconds if by_second else column.tens
            part = (ring[begin:end] if begin < end else ring[begin:] + ring[:end]).tobytes()
            if part != gap:
                found[name] = part
        names: Iterable[str] = found
        if len(found) * len(gap) > READ_BYTES_MAX:
            names = sorted(found, key=self._rank)[: READ_BYTES_MAX // len(gap)]
        return Stretch(tuple(names), first * step_s, step_s, rows, b"".join(found[name] for name in names))

    def _rank(self, name: str) -> tuple[bool, bool, float]:
        """Returns the sort key of a column: `worst` columns first, `fleeting` columns last, large sums first."""
        return name.startswith(self._fleeting), not name.endswith(self._worst), -self._columns[name].tens_sum

    def _make_room(self, row: Mapping[str, float]) -> None:
        """Adds the columns that a new row needs, as far as there is room.

        If there are too many columns, drops columns without a value in this row: `fleeting` columns first, then those
        without a value for the longest time.
        """
        new = [name for name in row if name not in self._columns]
        lacking = len(self._columns) + len(new) - COLUMNS_MAX
        if lacking > 0:
            idle = [name for name in self._columns if name not in row]
            idle.sort(key=lambda name: (not name.startswith(self._fleeting), self._columns[name].written_s))
            for name in idle[:lacking]:
                del self._columns[name]
        for name in new[: COLUMNS_MAX - len(self._columns)]:
            self._columns[name] = _Column()

    def _put(self, second: int, row: Mapping[str, float]) -> None:
        at, self.last_s = second % SECONDS, second
        for name, column in self._columns.items():
            value = row.get(name)
            if value is None:
                column.seconds[at] = nan
            else:
                column.seconds[at] = value
                column.written_s = second
        if second % TEN_S == TEN_S - 1:
            self._put_ten(second // TEN_S)

    def _put_ten(self, ten: int) -> None:
        begin = ten * TEN_S % SECONDS
        for name, column in self._columns.items():
            values = [value for value in column.seconds[begin : begin + TEN_S] if value == value]
            if not values:
                column.put_ten(ten, nan)
            elif name.endswith(self._worst):
                column.put_ten(ten, max(values))
            else:
                column.put_ten(ten, sum(values) / len(values))

    def _put_gap(self, begin: int, end: int) -> None:
        for missed in range(begin, end):
            self._put(missed, {})

    def _forget_tens(self, first: int, last: int) -> None:
        for ten in range(max(first, last - TENS), last):
            for column in self._columns.values():
                column.put_ten(ten, nan)
