"""Makes the files of each kind of export."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

from llmproxy.tools.export import scaling
from llmproxy.tools.export.boards import BOARDS
from llmproxy.tools.export.rules import rules

RULES = "llmproxy-rules.yml"
_HEAD = "# Written by `llmproxy export {}`. A later version writes it anew.\n"


def _grafana() -> dict[str, str]:
    return {f"{board.uid}.json": json.dumps(board.json(), indent=2) + "\n" for board in BOARDS}


def _alerts() -> dict[str, str]:
    return {RULES: _HEAD.format("alerts") + _yaml(rules())}


def _prometheus() -> dict[str, str]:
    scrape = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [RULES],
        "scrape_configs": [
            {
                "job_name": "llmproxy",
                # With tenants, a scraper on another machine sends the admin key: `authorization: {credentials: ...}`.
                "static_configs": [{"targets": ["127.0.0.1:8080"]}],
            }
        ],
    }
    return {"prometheus.yml": _HEAD.format("prometheus") + _yaml(scrape)}


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=100_000)


KINDS: dict[str, tuple[Callable[[], dict[str, str]], str]] = {
    "grafana": (
        _grafana,
        "In Grafana: Dashboards, New, Import, and choose each file. The rules of `llmproxy export "
        "alerts` fill the panel of errors.",
    ),
    "alerts": (_alerts, "Name the file under `rule_files` of Prometheus, and check it: promtool check rules FILE"),
    "prometheus": (
        _prometheus,
        "Set the targets, put the rules of `llmproxy export alerts` beside it, and start: "
        "prometheus --config.file FILE",
    ),
    "scaling": (scaling.files, "Change the names, the address and MODEL in one of them, and: kubectl apply -f FILE"),
}
"""Kind of export -> the function that makes its files, and the next step for the user."""


def files_of(kind: str) -> dict[str, str]:
    """Returns the files of a kind: name -> text. The same version always returns the same texts. Raises KeyError."""
    return KINDS[kind][0]()
