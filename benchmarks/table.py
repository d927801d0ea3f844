"""Tables in Markdown that are printed row by row."""

from __future__ import annotations

from collections.abc import Sequence


def line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


class Table:
    """Prints its header at once, and each row as soon as `row` is called.

    The columns of numbers are aligned to the right.
    """

    def __init__(self, *columns: str, texts: int = 1) -> None:
        """Prints the header. `texts` is the number of columns with text, on the left."""
        numbers = len(columns) - texts
        print(line(columns) + "\n" + line(["---"] * texts + ["--:"] * numbers), flush=True)

    def row(self, *cells: object) -> None:
        print(line(cells), flush=True)
