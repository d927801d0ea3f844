"""Links, anchors and paths in all pages are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.pages import REPOSITORY, broken, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("missing.md", "no such file"),
        ("glossary.md#no-such-word", "no such heading"),
        ("#nowhere", "no such heading"),
        ("../README.md", "the site has only docs/"),
        (f"{REPOSITORY}missing.py", "no such file"),
    ],
)
def test_broken_links_are_found(link: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for name, text in (("README.md", "# Readme"), ("docs/glossary.md", "# Glossary")):
        (tmp_path / name).write_text(text)
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"# Title\n\nA [link]({link}), [another](#title) and [one](https://example.org/x).\n")
    [problem] = broken(page)
    assert problem.startswith(link)
    assert reason in problem


def test_files_named_by_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    named = re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`", text)
    folders = [ROOT / "llmproxy", *(ROOT / "llmproxy" / one for one in ("gateway", "core")), ROOT]
    assert len(named) > 60
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def test_functions_named_by_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    calls = text.split("## The calls of a request")[1].split("```")[1]
    named = re.findall(r"(?:\w+/)*(\w+)\.([a-z_]+)\b", calls)
    assert len(named) > 15
    sources = {path.stem: "" for path in (ROOT / "llmproxy").rglob("*.py")}
    for path in (ROOT / "llmproxy").rglob("*.py"):
        sources[path.stem] += path.read_text()
    assert [one for one in named if f"def {one[1]}(" not in sources.get(one[0], "")] == []


CURRENT = [page for page in pages() if page.name != "CHANGELOG.md"]
"""The pages that describe this version; a changelog names files as they were."""


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_a_page_exist(page: Path) -> None:
    text = page.read_text()
    named = set(
        re.findall(
            r"`((?:llmproxy|tests|benchmarks|docs|core|gateway|backends|observe|remote|scheduling|tools|upstream|lab)/[\w./-]+)`",
            text,
        )
    )
    named |= {one.replace(".", "/") + ".py" for one in re.findall(r"python -m ((?:tests|benchmarks)(?:\.\w+)+)", text)}
    made_or_elsewhere = {"benchmarks/out/bin", "benchmarks/out/lab", "benchmarks/out/peers", "tests/requests"}
    places = [ROOT, ROOT / "llmproxy"]
    missing = [name for name in named - made_or_elsewhere if not _exists(name, places)]
    assert missing == []


def _exists(name: str, places: list[Path]) -> bool:
    return any((place / name).exists() or (place / name).with_suffix("").is_dir() for place in places)
