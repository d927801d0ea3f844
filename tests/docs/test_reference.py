"""The generated tables of docs/ are current."""

from __future__ import annotations

import pytest

from tests.docs.reference import DOCS, PAGES, PARTS, generated


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    text = (DOCS / name).read_text()
    assert text == generated(text), "python -m tests.docs.reference writes it anew"


def test_every_generated_table_is_in_one_page() -> None:
    text = "".join((DOCS / name).read_text() for name in PAGES)
    assert [text.count(f"<!-- generated: {part} -->\n") for part in PARTS] == [1] * len(PARTS)
