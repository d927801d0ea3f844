"""The commands of README.md, the tutorial and some how-tos print the output in these pages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.shell import matches, run

MISSING = [tool for tool in ("bash", "curl", "jq") if shutil.which(tool) is None]
DOCS = ROOT / "docs"
HOW_TOS = ("how-to/cluster.md", "how-to/disaggregation.md", "laboratory/simulated-replicas.md")
OWN_TOOLS = {"cluster.md": ("openssl", "redis-server")}
PAGES = [ROOT / "README.md", *sorted((DOCS / "tutorial").glob("*.md")), *(DOCS / name for name in HOW_TOS)]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"the pages use {', '.join(MISSING)}, which this machine lacks")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_print_the_output_on_the_page(page: Path, tmp_path: Path) -> None:
    if lacking := [tool for tool in OWN_TOOLS.get(page.name, ()) if shutil.which(tool) is None]:
        pytest.skip(f"the page uses {', '.join(lacking)}, which this machine lacks")
    outputs = list(run(page, tmp_path))
    assert outputs
    for line, expected, printed in outputs:
        assert matches(expected, printed), f"{page.name}, line {line}: printed {printed!r}"


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb\n", "a\nb", True),
        ("a ... c\n", "a b c", True),
        ("...\nend\n", "first\nsecond\nend", True),
        ("...\nend\n", "end", True),
        ("a\n", "b", False),
        ("a ...\n", "b a c", False),
        ("a\n", "a\nb", False),
    ],
)
def test_dots_stand_for_anything(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed) is same
