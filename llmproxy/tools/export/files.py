"""Makes the files of each kind of export."""

from __future__ import annotations

import json
from collections.abc import Callable

import yaml

from llmproxy.tools.export.boards import BOARDS
from llmproxy.tools.export.rules import rules

RULES = "llmproxy-rules.yml"
_HEAD = "# Written by `llmproxy export alerts`. A later version writes it anew.\n"


def _grafana() -> dict[str, str]:
    return {f"{board.uid}.json": json.dumps(board.json(), indent=2) + "\n" for board in BOARDS}


def _alerts() -> dict[str, str]:
    return {RULES: _HEAD + yaml.safe_dump(rules(), sort_keys=False, width=100_000)}


KINDS: dict[str, tuple[Callable[[], dict[str, str]], str]] = {
    "grafana": (
        _grafana,
        "In Grafana: Dashboards, New, Import, and choose each file. The rules of `llmproxy export "
        "alerts` fill the panel of errors.",
    ),
    "alerts": (_alerts, "Name the file under `rule_files` of Prometheus, and check it: promtool check rules FILE"),
}
"""Kind of export -> the function that makes its files, and the next step for the user."""


def files_of(kind: str) -> dict[str, str]:
    """Returns the files of a kind: name -> text. The same version always returns the same texts. Raises KeyError."""
    return KINDS[kind][0]()
