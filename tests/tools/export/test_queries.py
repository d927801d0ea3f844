"""Every query of the dashboards and rules names only series and labels of the process."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from llmproxy.tools.export import files_of
from llmproxy.tools.export.boards import BOARDS
from llmproxy.tools.export.panel import RELOADS, VARIABLES
from llmproxy.tools.export.rules import ALERTS, RECORDED, Alert
from tests.tools.export.promql import TARGET, QueryError, exported, known, labels_of, names_in, plain

PANELS = [(f"{board.uid}/{panel.title}", panel) for board in BOARDS for panel in board.panels]
NO_VARIABLES = frozenset({"__rate_interval", "__range"})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("panel", [panel for _, panel in PANELS], ids=[name for name, _ in PANELS])
def test_panels_ask_for_existing_series(panel: Any) -> None:
    for expression, legend in panel.queries:
        labels = labels_of(plain(expression), known())
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels
        assert not re.findall(r"\[\d+\w\]", expression), "a range is $__rate_interval, so that it fits any scrape"
        assert set(re.findall(r"\$(\w+)", expression)) - NO_VARIABLES <= {name for name, *_ in VARIABLES}


@pytest.mark.parametrize(("name", "expression"), RECORDED, ids=[name for name, _ in RECORDED])
def test_recording_rules_ask_for_existing_series(name: str, expression: str) -> None:
    assert labels_of(expression, exported()) == {"job", "band"}, f"{name} is by job and band"


@pytest.mark.parametrize("alert", ALERTS, ids=[f"{alert.name}{alert.window}" for alert in ALERTS])
def test_alerts_ask_for_existing_series(alert: Alert) -> None:
    labels = labels_of(alert.expression, known())
    shown = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    assert shown <= labels


def test_variables_and_annotations_ask_for_existing_series() -> None:
    for name, series, _ in VARIABLES:
        assert name in labels_of(plain(series), exported())
    assert labels_of(plain(RELOADS), exported()) >= TARGET


def test_every_metric_is_shown_somewhere() -> None:
    """A metric without a panel or rule need not be exported."""
    written = "".join(json.dumps(board.json()) for board in BOARDS) + "".join(expression for _, expression in RECORDED)
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names_in(written)}
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in exported() if name.startswith("llmproxy_")}
    # The overview marks reloads, and shows whether the last reload failed.
    assert families - shown == {"llmproxy_config_reloads"}


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("llmproxy_active_workers", "no series llmproxy_active_workers"),
        ('llmproxy_queued_requests{model="m"}', "no label model"),
        ("sum by (model) (rate(llmproxy_tenant_requests_total[5m]))", "no label model"),
        ("rate(llmproxy_queued_requests[5m])", "no counter"),
        ("avg_over_time(llmproxy_requests_total[5m])", "of a counter"),
        ("histogram_quantile(0.9, rate(llmproxy_time_to_first_token_seconds_count[5m]))", "no label le"),
        ("llmproxy_queued_requests / llmproxy_backend_limit", "never match"),
        ("llmproxy_queued_requests > 0 and on (backend) llmproxy_backend_limit", "no label backend"),
        (
            "llmproxy_backend_limit * on (job, instance, backend) group_left (model) llmproxy_backend_info",
            "no label mo",
        ),
        ("sum(llmproxy_queued_requests", "unclosed|unexpected|invalid"),
    ],
)
def test_a_wrong_query_is_found(expression: str, wrong: str) -> None:
    with pytest.raises(QueryError, match=wrong):
        labels_of(expression, known())


def test_grafana_can_import_the_dashboards() -> None:
    for name, text in files_of("grafana").items():
        board = json.loads(text)
        assert (board["id"], board["schemaVersion"], board["editable"], board["graphTooltip"]) == (None, 41, True, 1)
        assert name == f"{board['uid']}.json"
        panels = board["panels"]
        assert 0 < len(panels) <= 24
        assert all(panel["description"].endswith(".") for panel in panels)
        assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
        assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken
            assert max(x for x, _ in cells) < 24
            taken |= cells
        assert [one["name"] for one in board["templating"]["list"]] == ["datasource", *(name for name, *_ in VARIABLES)]


def test_the_same_files_are_written_each_time() -> None:
    for kind in ("grafana", "alerts"):
        assert files_of(kind) == files_of(kind)
