"""Alerts in the scenes of the demo that they are for: the second part of `make monitoring`, one to four minutes.

A real Prometheus has the rules of `llmproxy export alerts` with a second in the place of each minute. Each alert must
be silent before its scene, and fire in it. The demo plays no damage (`damage.py`), and no wrong file; `test_rules.py`
has all of them.
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
"""The scenes that are played at once, again and again, and the alert that must fire in them, with its labels."""
WAIT_S = 60.0
CALM_S = 150.0
"""An hour of a rule is a minute here; what is over must have left it."""


Alert = tuple[str, dict[str, str]]


def firing(prometheus: str, alert: Alert) -> bool:
    alerts = asked(f"{prometheus}/api/v1/alerts")["data"]["alerts"]
    wanted = {"alertname": alert[0], **alert[1]}.items()
    return any(one["state"] == "firing" and wanted <= one["labels"].items() for one in alerts)


def fires_in(name: str, again: Callable[[], object], alert: Alert, prometheus: str) -> str:
    """What is wrong, or empty. Does it `again` and again, and prints after how many seconds the alert fires."""
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
    return told(found)


def told(found: dict[str, str]) -> int:
    """Prints what is wrong, and returns the status of the process."""
    for name, problem in found.items():
        if problem:
            print(f"WRONG: {name}: {problem}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
