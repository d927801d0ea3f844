"""Values as text."""

from __future__ import annotations

from llmproxy.observe.text import ShownNames, shown


def test_names_are_remembered_up_to_a_bound() -> None:
    words = ShownNames()
    names = ["a b", "x" * (ShownNames.NAME_CHARS_MAX + 1), *map(str, range(2 * ShownNames.NAMES_MAX))]
    assert [words[name] for name in names * 2] == [shown(name) for name in names * 2]
    assert len(words) == ShownNames.NAMES_MAX
    assert max(map(len, words)) <= ShownNames.NAME_CHARS_MAX
