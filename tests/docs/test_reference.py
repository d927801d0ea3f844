"""The generated tables of docs/."""

from __future__ import annotations

import re

from llmproxy.gateway.http.errors import STATUS
from tests import ROOT
from tests.docs.meanings import OUTCOMES
from tests.docs.reference import DOCS, PAGES, PARTS


def test_every_generated_table_is_in_one_page() -> None:
    text = "".join((DOCS / name).read_text() for name in PAGES)
    assert [text.count(f"<!-- generated: {part} -->\n") for part in PARTS] == [1] * len(PARTS)


def test_every_exact_status_of_a_bad_request_is_named() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "llmproxy/gateway").rglob("*.py"))
    used = set(re.findall(r"\bstatus=([45]\d\d)\b", sources)) - {str(status) for status in STATUS.values()}
    assert used <= set(re.findall(r"\d{3}", OUTCOMES["bad_request"]))
