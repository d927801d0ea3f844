"""Markdown pages of this repository: their links, anchors and code blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests import ROOT

REPOSITORY = "https://github.com/llmproxy-lb/llmproxy/blob/main/"
"""Pages in docs/ link to files outside docs/ by this address, because the built site does not contain those files."""

_OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_ANCHOR = re.compile(r"<a id=\"([^\"]+)\">")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block: its language, its `title`, its text, and the line of the page where it begins."""

    language: str
    title: str | None
    text: str
    line: int


def pages() -> list[Path]:
    """All Markdown pages that people read, in order."""
    found = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    return sorted([*found, *(ROOT / "docs").rglob("*.md")])


@cache
def tokens(page: Path) -> tuple[Token, ...]:
    return tuple(MarkdownIt("commonmark").enable("table").parse(page.read_text()))


def links(page: Path) -> Iterator[str]:
    """The targets of all links and images of a page, as written."""
    for token in tokens(page):
        for inner in token.children or ():
            if inner.type in ("link_open", "image"):
                yield unquote(str(inner.attrs["href" if inner.type == "link_open" else "src"]))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the built site both give to the headings of a page, and those written as HTML."""
    seen: Counter[str] = Counter()
    found = set(_ANCHOR.findall(page.read_text()))
    for token, inner in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "heading_open":
            text = "".join(part.content for part in inner.children or () if part.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def blocks(page: Path) -> Iterator[Block]:
    """The fenced code blocks of a page, in order."""
    for token in tokens(page):
        if token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            assert token.map is not None
            yield Block(language, title[1] if title else None, token.content, token.map[0] + 1)


def broken(page: Path) -> Iterator[str]:
    """Each link of a page to a missing file or heading of this repository, with the reason."""
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(REPOSITORY):
            path = ROOT / target.removeprefix(REPOSITORY)
        elif _OUTSIDE.match(target):
            continue
        else:
            path = (page.parent / target).resolve() if target else page
            docs = ROOT / "docs"
            if docs in page.parents and docs not in path.parents:
                yield f"{link}: the site has only docs/, write {REPOSITORY}..."
                continue
        if not path.exists():
            yield f"{link}: there is no such file"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"{link}: {path.name} has no such heading"
