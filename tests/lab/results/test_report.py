"""The report: one file, everything in it, nothing drawn empty."""

from __future__ import annotations

import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from llmproxy.lab.results.report import ReportUnavailable, page
from llmproxy.lab.results.result import SimulationResult
from llmproxy.lab.results.table import ORACLE_NOTE
from tests.lab.invented import invented, invented_run

pytestmark = pytest.mark.slow

SECTIONS = (
    "Goodput",
    "Time to first token",
    "Time per output token",
    "Wait in the proxy's queue by band",
    "Load of each backend",
    "Prefix-cache hit ratio",
    "Share per tenant",
)


def svgs(html: str) -> list[str]:
    return re.findall(r"<svg .*?</svg>", html, re.DOTALL)


def absences(html: str) -> list[str]:
    return re.findall(r"<p class=absent>(.*?)</p>", html)


@pytest.fixture(scope="module")
def html() -> str:
    result, trails = invented(("blend", "random", "epp_sticky", "oracle"), (0.7, 1.5), seeds=2, count=80)
    return page(result, trails, "Title <1>", own=("blend",))


def test_every_plot_is_there_with_a_sentence(html: str) -> None:
    headings = [re.sub("&#x27;", "'", text) for text in re.findall(r"<h2>(.*?)</h2>", html)]
    assert headings == ["Results", "Bounds", *SECTIONS, "Configuration"]
    assert len(svgs(html)) == len(SECTIONS) == html.count("<figcaption>")
    assert absences(html) == []


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
    run, trail = invented_run("a<b>&$x$", 1.0, count=30)
    odd = page(SimulationResult(runs=[run]), {run.point: trail}, "t")
    assert "<b>" not in odd
    assert "a&lt;b&gt;&amp;$x$" in odd
    for svg in svgs(odd):
        ElementTree.fromstring(svg)


def test_policies_can_be_found_in_tables_and_plots_alike(html: str) -> None:
    assert '<tr class="own series s0"><th>blend' in html
    assert '<tr class="reference series s3"><th>oracle' in html
    assert html.count('class="series s0"') >= 6


def test_numbers_of_the_configuration_are_rounded() -> None:
    config: dict[str, Any] = {"trace_duration_s": 40.50000101250002, "scales": [4 / 3]}
    config["scheduling"] = {"headroom_s": 0.1 + 0.2}
    html = page(SimulationResult(runs=[], config=config), {}, "t")
    assert "<dt>trace_duration_s</dt><dd>40.5</dd>" in html
    assert "<dt>scales</dt><dd>1.33333</dd>" in html
    assert "&quot;headroom_s&quot;: 0.3\n" in html
    assert not re.search(r"\d\.\d{7}", re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL))


def test_why_an_oracle_may_lose_is_said_where_there_is_one() -> None:
    for policies in (("blend", "oracle"), ("blend",)):
        result, trails = invented(policies, (1.0,), count=20)
        assert (ORACLE_NOTE in page(result, trails, "t")) is ("oracle" in policies)


def test_equal_results_give_equal_pages() -> None:
    first, second = (page(*invented(("blend", "random"), (1.0,), count=60), "t", own=("blend",)) for _ in range(2))
    assert first == second


def test_run_without_completions_has_reasons_instead_of_plots() -> None:
    run, trail = invented_run("blend", 1.0, skill=0.0, count=30)
    said = " ".join(absences(page(SimulationResult(runs=[run]), {run.point: trail}, "t")))
    assert said.count("no request was completed") == 3
    assert "no request waited" in said
    assert "nothing was found in any prefix cache" in said


def test_policies_without_a_figure_are_named_in_the_caption() -> None:
    bad, bad_trail = invented_run("session", 1.0, skill=0.0, count=30)
    good, good_trail = invented_run("random", 1.0, count=30)
    html = page(SimulationResult(runs=[bad, good]), {bad.point: bad_trail, good.point: good_trail}, "t")
    assert html.count("because they completed nothing: session.") == 3


def test_tenants_may_have_any_name() -> None:
    result, trails = invented(("blend",), (1.0,), tenants=3, count=60)
    [run] = result.runs
    names = ["_quiet", "$\\frac{$", "two\nlines 名前"]
    odd = run.model_copy(update={"by_tenant": dict(zip(names, run.by_tenant.values(), strict=True))})
    shares = svgs(page(SimulationResult(runs=[odd]), trails, "t"))[-1]
    ElementTree.fromstring(shares)
    for text in ("_quiet", "$\\frac{$", "two lines 名前"):
        assert f"{text} -->" in shares


def test_one_tenant_has_no_shares() -> None:
    result, trails = invented(("blend",), (1.0,), tenants=1, count=30)
    assert "Left out: there was only one tenant." in absences(page(result, trails, "t"))


def test_one_request_is_enough_for_a_report() -> None:
    run, trail = invented_run("blend", 1.0, count=1)
    html = page(SimulationResult(runs=[run]), {run.point: trail}, "t")
    assert len(svgs(html)) == 5
    assert "Left out: too few requests waited in a proxy for a line over time." in absences(html)


def test_without_trails_there_is_still_goodput() -> None:
    result, _ = invented(("blend", "random"), (1.0, 2.0), count=30)
    html = page(result, {}, "t")
    assert len(svgs(html)) == 1


def test_plots_show_the_load_at_which_policies_differ_most() -> None:
    result, trails = invented(("blend", "random"), (1.0, 2.0), count=30)
    goodputs = {("blend", 1.0): 0.9, ("random", 1.0): 0.2, ("blend", 2.0): 0.3, ("random", 2.0): 0.2}
    runs = [run.model_copy(update={"goodput": goodputs[run.policy, run.rate_scale]}) for run in result.runs]
    html = page(SimulationResult(runs=runs), trails, "t")
    assert "At rate_scale 1, prefill_scale 1, seed 1." in html
    assert "At rate_scale 2," not in html


def test_no_run_at_all_is_said() -> None:
    html = page(SimulationResult(runs=[]), {}, "t")
    assert "Nothing was run." in html
    assert svgs(html) == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("plots", "drawing"):
        monkeypatch.delitem(sys.modules, f"llmproxy.lab.results.{name}", raising=False)
        monkeypatch.delattr(f"llmproxy.lab.results.{name}", raising=False)
    result, trails = invented(("blend",), (1.0,), count=10)
    with pytest.raises(ReportUnavailable, match=r"needs matplotlib: pip install 'llmproxy-lb\[lab\]'"):
        page(result, trails, "t")
