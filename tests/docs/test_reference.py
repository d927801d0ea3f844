"""The generated tables of docs/."""

from __future__ import annotations

from tests.docs.reference import DOCS, PAGES, PARTS


def test_every_generated_table_is_in_one_page() -> None:
    text = "".join((DOCS / name).read_text() for name in PAGES)
    assert [text.count(f"<!-- generated: {part} -->\n") for part in PARTS] == [1] * len(PARTS)
