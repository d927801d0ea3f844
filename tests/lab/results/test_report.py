"""The report: one file, everything in it, nothing drawn empty."""

from __future__ import annotations

import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from llmproxy.lab.results.report import page
from llmproxy.lab.results.result import SimulationResult
from llmproxy.lab.results.table import ORACLE_NOTE
from tests.lab.invented import invented

pytestmark = pytest.mark.slow


def svgs(html: str) -> list[str]:
    return re.findall(r"<svg .*?</svg>", html, re.DOTALL)


@pytest.fixture(scope="module")
def html() -> str:
    result = invented(("blend", "random", "epp_sticky", "oracle"), (0.7, 1.5), seeds=2, count=80)
    return page(result, "Title <1>", own=("blend",))


def test_every_plot_is_there_with_a_sentence(html: str) -> None:
    assert re.findall(r"<h2>(.*?)</h2>", html) == ["Results", "Bounds", "Goodput", "Configuration"]
    assert len(svgs(html)) == html.count("<figcaption>") == 1


def test_the_page_needs_no_network(html: str) -> None:
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert addresses == {"http://www.w3.org/1999/xlink"}
    assert not re.search(r"(src|href)=\"(?!#|data:)", html)
    assert "@import" not in html


def test_plots_are_well_formed_and_never_share_a_name(html: str) -> None:
    for svg in svgs(html):
        ElementTree.fromstring(svg)
    names = re.findall(r'\bid="([^"]+)"', html)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(names)


def test_plots_take_their_colours_from_the_page(html: str) -> None:
    assert not any(re.search(r"#[0-9a-f]{6}\b", svg) for svg in svgs(html))
    assert set(re.findall(r"var\((--\w+)\)", html)) <= set(re.findall(r"(--\w+):", html))
    assert "prefers-color-scheme:dark" in html


def test_titles_and_names_are_text_and_not_markup(html: str) -> None:
    assert "<title>Title &lt;1&gt;</title>" in html
    odd = page(invented(("a<b>&$x$", "_quiet", "two\nlines 名前"), (1.0, 2.0), count=30), "t")
    assert "<b>" not in odd
    assert "a&lt;b&gt;&amp;$x$" in odd
    for svg in svgs(odd):
        ElementTree.fromstring(svg)


def test_policies_can_be_found_in_tables_and_plots_alike(html: str) -> None:
    assert '<tr class="own series s0"><th>blend' in html
    assert '<tr class="reference series s3"><th>oracle' in html
    assert html.count('class="series s0"') >= 2


def test_numbers_of_the_configuration_are_rounded() -> None:
    config: dict[str, Any] = {"trace_duration_s": 40.50000101250002, "scales": [4 / 3]}
    config["scheduling"] = {"headroom_s": 0.1 + 0.2}
    html = page(SimulationResult(runs=[], config=config), "t")
    assert "<dt>trace_duration_s</dt><dd>40.5</dd>" in html
    assert "<dt>scales</dt><dd>1.33333</dd>" in html
    assert "&quot;headroom_s&quot;: 0.3\n" in html
    assert not re.search(r"\d\.\d{7}", re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL))


def test_why_an_oracle_may_lose_is_said_where_there_is_one() -> None:
    for policies in (("blend", "oracle"), ("blend",)):
        assert (ORACLE_NOTE in page(invented(policies, (1.0,), count=20), "t")) is ("oracle" in policies)


def test_equal_results_give_equal_pages() -> None:
    first, second = (page(invented(("blend", "random"), (1.0, 2.0), count=60), "t", own=("blend",)) for _ in range(2))
    assert first == second


def test_one_load_has_a_table_and_no_plot() -> None:
    assert svgs(page(invented(("blend",), (1.0,), count=1), "t")) == []


def test_runs_without_requests_have_no_plot() -> None:
    runs = [run.model_copy(update={"goodput": None}) for run in invented(("blend",), (1.0, 2.0), count=1).runs]
    assert svgs(page(SimulationResult(runs=runs), "t")) == []


def test_no_run_at_all_is_said() -> None:
    html = page(SimulationResult(runs=[]), "t")
    assert "Nothing was run." in html
    assert svgs(html) == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("plots", "drawing"):
        monkeypatch.delitem(sys.modules, f"llmproxy.lab.results.{name}", raising=False)
        monkeypatch.delattr(f"llmproxy.lab.results.{name}", raising=False)
    result = invented(("blend",), (1.0,), count=10)
    html = page(result, "t")
    assert "Plots need matplotlib: pip install 'llmproxy-lb[lab]'" in html
    assert "<h2>Results</h2>" in html
