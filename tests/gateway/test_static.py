"""The files of the page: small, with unchanged libraries, and without markup from text."""

from __future__ import annotations

import re
from gzip import compress
from hashlib import sha256
from pathlib import Path

import llmproxy.gateway
from llmproxy.gateway.admin.static import TYPES

STATIC = Path(llmproxy.gateway.__file__).parent / "static"
OURS = [path for path in STATIC.rglob("*") if path.suffix in TYPES and path.parent.name != "vendor"]
VENDORED = {
    # uPlot 1.6.32 as it is published: dist/uPlot.iife.min.js, dist/uPlot.min.css, LICENSE.
    "uPlot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot-LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
PACKED_BYTES_MAX = 100_000


MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!www\.w3\.org/2000/svg)"
)


def test_vendored_files_are_as_published() -> None:
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()}
    assert found == VENDORED


def test_no_text_becomes_markup_and_nothing_is_fetched_from_elsewhere() -> None:
    assert len(OURS) > 10
    for path in OURS:
        assert MARKUP.findall(path.read_text()) == [], path.name
        assert not re.search(r"\sstyle=|\son\w+=", path.read_text()) or path.suffix != ".html", path.name


def test_page_is_small() -> None:
    packed = sum(len(compress(path.read_bytes(), 9)) for path in STATIC.rglob("*") if path.suffix in TYPES)
    assert 30_000 < packed < PACKED_BYTES_MAX
