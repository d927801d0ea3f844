"""The report of a simulation: one HTML file for a browser, which loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from llmproxy.lab.results.result import REFERENCES, LoadPoint, Row, SimulationResult, load_points, policies_of, rounded
from llmproxy.lab.results.table import (
    COLUMNS,
    MISSING,
    ORACLE_NOTE,
    bound_value,
    bounds_by_name,
    has_oracle,
    heading,
    is_best,
    write,
)

if TYPE_CHECKING:
    from llmproxy.lab.results.plots import Plot

FACTS_FIRST = ("workload", "case", "trace", "requests", "trace_duration_s", "fleet", "replicas", "proxies", "seeds")
FACT_MAX = 120  # Longer configuration values are shown below the plots only.
RULES = (
    "Every policy met the same arrivals. Goodput is the share of all <em>offered</em> requests that were completed "
    "within both of their objectives, time to first token and mean time per output token: refusals, timeouts and "
    "failures are misses. Quantiles are nearest-rank, over completed requests, within 0.5 %. Figures of several seeds "
    "are averaged."
)
VIRTUAL = "Times are virtual: no GPU was run, and latencies deep in overload should not be taken as absolute."


@dataclass(frozen=True, slots=True)
class ExtraTable:
    """An additional table, with plain text in every cell."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Extra:
    """Additional parts of a page. `draw` is called within the plot style. `times` says how the times were found."""

    tables: Sequence[ExtraTable] = ()
    draw: Callable[[], Sequence[Plot]] | None = None
    times: str = VIRTUAL


NOTHING_MORE = Extra()


def page(result: SimulationResult, title: str, own: Collection[str] = (), extra: Extra = NOTHING_MORE) -> str:
    """Returns `result` as an HTML page. Equal arguments give equal text.

    `own` are the names of llmproxy's own policies, which have thicker lines. Without matplotlib, a sentence replaces
    the plots.
    """
    figures = _figures(result, own, extra)
    policies, points = policies_of(result), load_points(result)
    tables = "".join(_load(point, policies, own) for point in points) or "<p>Nothing was run.</p>"
    rules = " ".join((RULES, escape(extra.times), *((ORACLE_NOTE,) if has_oracle(points) else ())))
    extras = "".join(
        _section(
            one.title,
            _table([_text("th", head) for head in one.heads], [[_text("td", x) for x in row] for row in one.rows]),
        )
        for one in extra.tables
    )
    config = escape(json.dumps(rounded(result.config), indent=2, ensure_ascii=False))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{_CSS}</style></head><body>
<header><h1>{escape(title)}</h1>{_facts(result, points, policies)}<p class="rules">{rules}</p></header>
<main><section><h2>Results</h2>{tables}</section>{extras}{_bounds(points)}
{figures}
<section><h2>Configuration</h2><details><summary>Inputs of the runs</summary><pre>{config}</pre>
</details></section></main><script>{_SCRIPT}</script></body></html>
"""


def _figures(result: SimulationResult, own: Collection[str], extra: Extra) -> str:
    try:
        from llmproxy.lab.results import drawing, plots
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("llmproxy"):
            raise
        return _section("Plots", f"<p class=absent>Plots need {error.name}: pip install 'llmproxy-lb[lab]'</p>")
    sections = []
    with drawing.style():
        drawn = [*(extra.draw() if extra.draw is not None else ()), plots.goodput_plot(result, own)]
        for i, plot in enumerate(plot for plot in drawn if plot is not None):
            svg = drawing.to_svg(plot.figure, i)
            content = f"<figure>{svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"
            sections.append(_section(plot.title, content))
    return "\n".join(sections)


# --- words and tables -------------------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _text(tag: str, text: str) -> str:
    return f"<{tag} class=text>{escape(text)}</{tag}>"


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    return f"<div class=wide><table class=bounds>{head}<tbody>{body}</tbody></table></div>"


def _facts(result: SimulationResult, points: list[LoadPoint], policies: list[str]) -> str:
    """Returns the summary of the inputs: simple values of the configuration, and figures of the runs."""
    ranks = {name: rank for rank, name in enumerate(FACTS_FIRST)}
    ordered = sorted(result.config, key=lambda name: ranks.get(name, len(ranks)))
    facts = {name: text for name in ordered if (text := _plain(result.config[name])) is not None}
    facts |= {
        "policies": str(len(policies)),
        "rate_scale": ", ".join(f"{rate:g}" for rate in sorted({point.rate_scale for point in points})),
        "prefill_scale": ", ".join(f"{prefill:g}" for prefill in sorted({point.prefill_scale for point in points})),
        "runs": f"{len(result.runs):,}",
        "requests simulated": f"{sum(run.offered for run in result.runs):,}",
    }
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(text or MISSING)}</dd></div>" for name, text in facts.items())
    return f"<dl>{''.join(items)}</dl>"


def _plain(value: object) -> str | None:
    """Formats a value on one line; None if it is too long or too deep."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        return None
    text = ", ".join(str(rounded(item)) for item in items)
    return text if len(text) <= FACT_MAX else None


def _load(point: LoadPoint, policies: list[str], own: Collection[str]) -> str:
    heads = "".join(f"<th>{_head(column.title)}</th>" for column in COLUMNS)
    rows = "".join(_row(row, point, policies.index(row.policy), own) for row in point.rows)
    return (
        f"<h3>{escape(heading(point))}</h3><div class=wide><table><thead><tr><th>policy</th>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _head(title: str) -> str:
    unit = {"TTFT": " s", "TPOT": " ms", "queue": " s"}.get(title.split("\n")[0], "")
    return escape(title.replace("-\n", "").replace("\n", " ") + unit)


def _row(row: Row, point: LoadPoint, number: int, own: Collection[str]) -> str:
    kind = "own" if row.policy in own else "reference" if row.policy in REFERENCES else "baseline"
    cells = "".join(
        f"<td{' class=best' if is_best(column, row, point) else ''}>{write(column, row)}</td>" for column in COLUMNS
    )
    return f'<tr class="{kind} series s{number}"><th>{escape(row.policy)}</th>{cells}</tr>'


def _bounds(points: list[LoadPoint]) -> str:
    bounds = bounds_by_name(points)
    if not bounds:
        return ""
    loads = [f"<th>rate {point.rate_scale:g}<br>prefill {point.prefill_scale:g}</th>" for point in points]
    rows = (
        [
            f"<th>{escape(name)}</th>",
            *(f"<td>{bound_value(point.bounds.get(name))}</td>" for point in points),
            _text("td", bound.unit),
            _text("td", bound.about),
        ]
        for name, bound in bounds.items()
    )
    return _section("Bounds", _table(["<th>bound</th>", *loads, _text("th", "unit"), _text("th", "meaning")], rows))


# --- the look of the page ---------------------------------------------------------------------------------------------

_CSS = """
:root{--ink:#1b1f24;--muted:#5f6b76;--grid:#d8dee5;--page:#fff;--card:#f5f7f9;
--c0:#0060c0;--c1:#c8500a;--c2:#00805a;--c3:#a8447f;--c4:#2f9ac6;--c5:#a87900;--c6:#7a4b2a}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--muted:#9aa5b1;--grid:#39424c;--page:#14181d;
--card:#1d2329;--c0:#5aa9ff;--c1:#ff8a4c;--c2:#3cc99a;--c3:#e58fc4;--c4:#86d6f7;--c5:#f0c04a;--c6:#cfa07c}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1120px;padding:24px 20px 64px;background:var(--page);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:26px;margin:0 0 12px;line-height:1.25;overflow-wrap:anywhere}h2{font-size:19px;margin:40px 0 8px}
h3{font-size:14px;margin:20px 0 4px;color:var(--muted);font-weight:600}
dl{display:flex;flex-wrap:wrap;gap:8px;margin:0 0 14px}dl div{background:var(--card);border-radius:8px;padding:7px 12px}
dt{font-size:12px;color:var(--muted)}dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.rules,.absent,figcaption{color:var(--muted);max-width:88ch}figure{margin:0}figcaption{font-size:14px;margin-top:6px}
svg{display:block;width:100%;height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:4px 6px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
thead th{color:var(--muted);font-weight:600;border-bottom-width:2px}
th:first-child{text-align:left}tbody th{font-weight:400}tr.own th{font-weight:700}tr.own{background:var(--card)}
tr.reference{font-style:italic;color:var(--muted)}td.best{font-weight:700}
table.bounds{margin-top:10px;font-size:13px}th.text,td.text{text-align:left}td.text:last-child{white-space:normal;min-width:32ch}
pre{overflow:auto;background:var(--card);padding:12px;border-radius:8px;font-size:12.5px}summary{cursor:pointer}
.focus svg .series:not(.on){opacity:.12}.focus tr.on{outline:2px solid var(--c0);outline-offset:-2px}
@media print{body{max-width:none;padding:0;font-size:11px}section{break-inside:avoid}.wide{overflow:visible}
th,td{padding:2px 5px}tr.own,dl div,pre{background:none;border:1px solid var(--grid)}}
"""
_SCRIPT = """
let last=null;
addEventListener('pointerover',event=>{
  const at=event.target.closest('.series'),name=at?[...at.classList].find(c=>/^s\\d+$/.test(c)):null;
  if(name===last)return;
  last=name;
  document.body.classList.toggle('focus',!!name);
  document.querySelectorAll('.series').forEach(e=>e.classList.toggle('on',!!name&&e.classList.contains(name)));
});
"""
"""Highlights a policy in all tables and plots while the pointer is on it."""
