"""Values as text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.observe.text import ShownNames, shown, shown_seconds


@given(st.floats() | st.integers(-(10**20), 10**20))
@example(0.00005)
@example(-0.0)
@example(1e22)
@example(123456789012345.67)
def test_seconds_read_as_if_rounded(value: float) -> None:
    assert shown_seconds(value) == str(round(value, 4))


def test_names_are_remembered_up_to_a_bound() -> None:
    words = ShownNames()
    names = ["a b", "x" * (ShownNames.NAME_CHARS_MAX + 1), *map(str, range(2 * ShownNames.NAMES_MAX))]
    assert [words[name] for name in names * 2] == [shown(name) for name in names * 2]
    assert len(words) == ShownNames.NAMES_MAX
    assert max(map(len, words)) <= ShownNames.NAME_CHARS_MAX
