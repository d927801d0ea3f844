"""The data of `/debug/live` as plain HTML tables, for browsers without JavaScript and for text browsers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

REFRESH_S = 5

_Columns = tuple[tuple[str, Callable[[Mapping[str, Any]], object]], ...]
_BANDS: _Columns = (
    ("Band", lambda one: one["band"]),
    ("Waiting", lambda one: one["waiting"]),
    ("Oldest", lambda one: _seconds(one["oldest_s"])),
    ("Granted/s", lambda one: one["grants_per_s"]),
    ("TTFT p50", lambda one: _seconds(one["ttft_s"]["p50"])),
    ("TTFT p99", lambda one: _seconds(one["ttft_s"]["p99"])),
    ("Why", lambda one: "; ".join(one["reasons"])),
)
_BACKENDS: _Columns = (
    ("Replica", lambda one: one["backend"] if one["role"] == "both" else f"{one['backend']} ({one['role']})"),
    ("State", lambda one: f"{one['state']} {one['why']}".strip()),
    ("Load", lambda one: one["load"]),
    ("Limit", lambda one: one["limit"]),
    ("KV cache", lambda one: _percent(one["kv_used"])),
    ("Engine queue", lambda one: one["waiting"]),
    ("Tokens/s", lambda one: one["output_tokens_per_s"]),
    ("Cache hits", lambda one: _percent(one["hit_share"])),
)
_FLOWS: _Columns = (
    ("Flow", lambda one: one["flow"]),
    ("Band", lambda one: one["band"]),
    ("Got", lambda one: _percent(one["share"])),
    ("Due", lambda one: _percent(one["due"])),
    ("Tokens/s", lambda one: one["tokens_per_s"]),
    ("Waiting", lambda one: one["waiting"]),
)
_EVENTS: _Columns = (
    ("Time", lambda one: one["time"]),
    ("Event", lambda one: one["event"]),
    ("Text", lambda one: one["text"]),
)


def plain_page(document: Mapping[str, Any]) -> str:
    """Returns a document of `/debug/live` as HTML, with all texts escaped."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>llmproxy</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="refresh" content="{REFRESH_S}"><link rel="stylesheet" href="/ui/app.css">',
        '<link rel="icon" href="/ui/icon.svg">',
        f"</head><body><main><h1>llmproxy</h1><p>{escape(document['summary']['text'])}</p>",
        _table("Bands", _BANDS, document["bands"]),
        _table("Replicas", _BACKENDS, document["backends"]),
        _table("Flows of the last minute", _FLOWS, document["flows"]),
        _table("Events, the newest first", _EVENTS, document["events"]),
        f"<p>This page reloads every {REFRESH_S} s.</p></main></body></html>\n",
    ]
    # A name may contain surrogates, which UTF-8 cannot encode.
    return "".join(parts).encode(errors="replace").decode()


def _table(caption: str, columns: _Columns, rows: Iterable[Mapping[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name, _ in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_shown(value(row)))}</td>" for _, value in columns) + "</tr>" for row in rows
    )
    return (
        f'<section class="card scroll"><h2>{caption}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></section>"
    )


def _shown(value: object) -> str:
    return "–" if value is None else str(value)


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f} s"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"
