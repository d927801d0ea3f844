"""The dashboards and rules on a real Prometheus that reads the demo: first part of `make monitoring`, 90 s.

Each query of each panel must have data, except the panels in `EMPTY`, and each rule must evaluate without an error.
"""

from __future__ import annotations

import shutil
import sys
import time

from llmproxy.tools.export.boards import BOARDS
from tests.tools.export.beside import asked, begin, play, watched
from tests.tools.export.promql import plain

LASTS_S = 60.0
"""Duration of the demo; rates cover 30 s."""
SCENES = ("kill", "adapter")
"""Scenes that are played first, for failures and changes of adapters."""
EMPTY = {
    "Blocked": "no usage limit is used up in the demo",
    "Preemptions": "only if a critical request finds all full, which is up to chance",
    "Requests by tenant": "the demo has no tenants with keys",
    "Queue wait by tenant": "the demo has no tenants with keys",
    "Tokens by tenant": "the demo has no tenants with keys",
    "Share by tenant": "the demo has no tenants with keys",
    "Looks at sources of backends": "all backends are configured",
    "Start of replicas": "all replicas are there when the demo begins",
    "Prefill and decode apart": "no replica of the demo has a role",
    "Stages of split requests": "no replica of the demo has a role",
    "Replicas needed by role": "no replica of the demo has a role",
    "Cluster": "the demo is one proxy",
    "Changes of the leader": "the demo is one proxy",
    "Attempts by verdict": "only if an attempt fails in the time that is watched",
}
"""Panels that may be without data, and why."""


def without_data(prometheus: str) -> dict[str, list[str]]:
    """The queries without data now, by panel."""
    empty: dict[str, list[str]] = {}
    for board in BOARDS:
        for panel in board.panels:
            for expression, _ in panel.queries:
                query = plain(expression.replace("$__rate_interval", f"{LASTS_S:g}s"))
                found = asked(f"{prometheus}/api/v1/query", query=query)["data"]["result"]
                if not found:
                    empty.setdefault(panel.title, []).append(query)
    return empty


def unhealthy(prometheus: str) -> list[str]:
    groups = asked(f"{prometheus}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return [f"{rule['name']}: {rule.get('lastError', rule['health'])}" for rule in rules if rule["health"] != "ok"]


def main() -> int:
    if shutil.which("prometheus") is None:
        print("skipped: prometheus is not installed (Debian: prometheus)")
        return 0
    with watched(interval_s=2) as (proxy, prometheus):
        for scene in SCENES:
            begin(proxy, scene)
        play(proxy, "lead")
        time.sleep(LASTS_S)
        empty, sick = without_data(prometheus), unhealthy(prometheus)
    count = sum(len(board.panels) for board in BOARDS)
    wrong = {title: queries for title, queries in empty.items() if title not in EMPTY}
    print(f"{count - len(empty)} of {count} panels have data.")
    for title in empty.keys() & EMPTY.keys():
        print(f"  without data: {title} ({EMPTY[title]})")
    for title, queries in wrong.items():
        print(f"WRONG: {title} has no data:", *queries, sep="\n    ")
    for problem in sick:
        print(f"WRONG: rule {problem}")
    return 1 if wrong or sick else 0


if __name__ == "__main__":
    sys.exit(main())
