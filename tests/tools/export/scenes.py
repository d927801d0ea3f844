"""Alerts in their scenes of the demo: the second part of `make monitoring`, one to four minutes.

A real Prometheus has the rules of `llmproxy export alerts`, with minutes as seconds. Each alert must be silent before
its scene, and fire in the scene. `damage.py` tests alerts without a scene; `test_rules.py` tests all alerts.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from tests.tools.export.beside import asked, play, watched

SCENES: tuple[tuple[tuple[str, ...], str, dict[str, str]], ...] = (
    (("flood",), "LlmproxyErrorBudgetBurn", {"band": "sheddable"}),
    (("noisy-tenant",), "LlmproxyErrorBudgetBurn", {"band": "default"}),
    (("flood", "noisy-tenant"), "LlmproxyStarvation", {"band": "sheddable"}),
    (("slow",), "LlmproxyBackendEjected", {"backend": "replica-3"}),
    (("kill",), "LlmproxyBackendDown", {"backend": "replica-3"}),
)
"""Scenes that are played together and repeatedly, the alert that must fire in them, and its labels."""
WAIT_S = 60.0
CALM_S = 150.0
"""An hour of a rule is a minute here; the windows of rules must no longer cover an earlier scene."""


Alert = tuple[str, dict[str, str]]


def firing(prometheus: str, alert: Alert) -> bool:
    alerts = asked(f"{prometheus}/api/v1/alerts")["data"]["alerts"]
    wanted = {"alertname": alert[0], **alert[1]}.items()
    return any(one["state"] == "firing" and wanted <= one["labels"].items() for one in alerts)


def fires_in(name: str, again: Callable[[], object], alert: Alert, prometheus: str) -> str:
    """Returns a problem, or an empty text. Calls `again` until the alert fires, and prints the seconds until then."""
    ends = time.monotonic() + CALM_S
    while firing(prometheus, alert):
        if time.monotonic() > ends:
            return "it fires before its scene"
        time.sleep(1.0)
    began = time.monotonic()
    while not firing(prometheus, alert):
        if time.monotonic() > began + WAIT_S:
            return f"it does not fire within {WAIT_S:.0f} s"
        again()
        time.sleep(1.0)
    print(f"{name}: {alert[0]} {alert[1]} after {time.monotonic() - began:.0f} s", flush=True)
    return ""


def main() -> int:
    if shutil.which("prometheus") is None:
        print("skipped: prometheus is not installed (Debian: prometheus)")
        return 0
    with watched(interval_s=1, times=60) as (proxy, prometheus):

        def played(scenes: tuple[str, ...], alert: Alert) -> str:
            def again() -> None:
                for scene in scenes:
                    play(proxy, scene)

            return fires_in(" and ".join(scenes), again, alert, prometheus)

        found = {" and ".join(scenes): played(scenes, (name, labels)) for scenes, name, labels in SCENES}
    return report(found)


def report(found: dict[str, str]) -> int:
    """Prints the problems, and returns the exit status."""
    for name, problem in found.items():
        if problem:
            print(f"WRONG: {name}: {problem}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
