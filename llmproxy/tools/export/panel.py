"""Makes panels and dashboards as the JSON that Grafana imports: the classic model, schema version 41."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 41
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
HERE = 'job=~"$job",instance=~"$instance"'  # Label matchers that select the chosen proxies.
VARIABLES = (
    ("job", "llmproxy_build_info", "Job"),
    ("instance", 'llmproxy_build_info{job=~"$job"}', "Proxy"),
    ("model", f"llmproxy_requests_total{{{HERE}}}", "Model"),
    ("band", f"llmproxy_queued_requests{{{HERE}}}", "Band"),
    ("backend", f"llmproxy_backend_info{{{HERE}}}", "Backend"),
)
"""The name, the series and the title of each variable of a dashboard.

The values of a variable come from the label of the same name.
"""
RELOADS = f"changes(llmproxy_config_last_reload_timestamp_seconds{{{HERE}}}[1m]) > 0"
SIZES = {"stat": (4, 4), "timeseries": (8, 8), "state-timeline": (8, 8), "table": (8, 8)}
"""The width and the height of each kind of panel, in grid units."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    description: str
    # Pairs of a PromQL expression and the legend of its series.
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Returns the panel as Grafana's JSON, with its id `number` and its position in grid units."""
        width, height = SIZES[self.kind]
        custom: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if self.kind == "timeseries":
            custom = {"fillOpacity": 20 if self.stacked else 0, "showPoints": "never", "spanNulls": False}
            if self.stacked:
                custom["stacking"] = {"mode": "normal", "group": "A"}
            options = {"legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"},
                       "tooltip": {"mode": "multi", "sort": "desc"}}  # fmt: skip
        elif self.kind == "stat":
            options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": width, "h": height},
            "fieldConfig": {"defaults": {"unit": self.unit, "custom": custom}, "overrides": []},
            "options": options,
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": DATASOURCE,
                    "expr": expression,
                    "legendFormat": legend,
                    **({"instant": True, "range": False, "format": "table"} if self.kind == "table" else {}),
                }
                for index, (expression, legend) in enumerate(self.queries)
            ],
        }


@dataclass(frozen=True, slots=True)
class Board:
    """A Grafana dashboard. Its `uid` is fixed, so that an import replaces the dashboard of an earlier version."""

    uid: str
    title: str
    description: str
    panels: Sequence[Panel]

    def json(self) -> dict[str, Any]:
        return {
            "id": None,
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["llmproxy"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": _variables()},
            "annotations": {"list": [_reloads()]},
            "links": [
                {"type": "dashboards", "title": "llmproxy", "tags": ["llmproxy"], "asDropdown": True,
                 "includeVars": True, "keepTime": True},
                {"type": "link", "title": "Live page", "url": "http://${instance}/ui", "targetBlank": True,
                 "tooltip": "The page of the proxy itself; choose one proxy above"},
            ],
            "panels": self._placed(),
        }  # fmt: skip

    def _placed(self) -> list[dict[str, Any]]:
        """Returns the panels as JSON, placed in rows from left to right."""
        placed, x, y, row = [], 0, 0, 0
        for number, panel in enumerate(self.panels, 1):
            width, height = SIZES[panel.kind]
            if x + width > COLUMNS:
                x, y, row = 0, y + row, 0
            placed.append(panel.json(number, x, y))
            x, row = x + width, max(row, height)
        return placed


def _variables() -> list[dict[str, Any]]:
    chosen = [
        {
            "type": "query",
            "name": name,
            "label": label,
            "datasource": DATASOURCE,
            "query": {"query": f"label_values({series}, {name})", "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }
        for name, series, label in VARIABLES
    ]
    return [{"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}, *chosen]


def _reloads() -> dict[str, Any]:
    return {
        "name": "Reloads",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": RELOADS,
        "titleFormat": "configuration read",
        "textFormat": "{{instance}}",
        "step": "30s",
    }
