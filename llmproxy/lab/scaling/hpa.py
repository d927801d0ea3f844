"""The scaling rules of Kubernetes' HPA, from its documentation and `replica_calculator.go`.

The metric is external, with an average value `target`. Within the tolerance nothing changes; otherwise the wanted
number is ceil(value / target). Stabilisation windows and policies limit each change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class HpaRules:
    """The limits of a scaling step.

    Within `up_every_s`, at most `up_pods` replicas or the share `up_share` of the replicas are added, whichever is
    more. Removals follow the same rule; with `down_pods` None, only `down_share` counts.
    """

    tolerance: float = 0.1
    down_window_s: float = 300.0
    up_pods: int = 4
    up_share: float = 1.0
    up_every_s: float = 15.0
    down_pods: int | None = None
    down_share: float = 1.0
    down_every_s: float = 15.0


DEFAULTS = HpaRules()
FOLLOWING = HpaRules(tolerance=0.0, down_pods=1, down_share=0.0, down_every_s=60.0)
"""The rules of `deploy/kustomize/overlays/autoscale/keda.yaml`."""


class Hpa:
    """An autoscaler. The number of replicas starts at `least` and stays within `least` and `most`."""

    def __init__(self, rules: HpaRules, least: int, most: int) -> None:
        self._rules = rules
        self._least, self._most = least, most
        self._wanted: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()
        self.replicas = least

    def follow(self, value: float | None, target: float, now: float) -> int:
        """Returns the number of replicas after a reading of the metric. A missing metric (None) changes nothing."""
        if value is None:
            return self.replicas
        tolerance = self._rules.tolerance
        ratio = value / (target * self.replicas) if self.replicas else float("inf")
        wanted = (
            self.replicas
            if 1.0 - tolerance <= ratio <= 1.0 + tolerance
            else ceil(min(value / target, float(self._most)) - 1e-9)
        )
        wanted = max(self._least, min(self._most, wanted))
        bounded = self._limited(self._stabilised(wanted, now), now)
        if bounded != self.replicas:
            self._changes.append((now, bounded - self.replicas))
            self.replicas = bounded
        return self.replicas

    def _stabilised(self, wanted: int, now: float) -> int:
        """Returns the number of replicas after the stabilisation window of the HPA; `wanted` is the present wish.

        A smaller number is raised to the largest wish of the last `down_window_s`.
        """
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._rules.down_window_s:
            self._wanted.popleft()
        if wanted < self.replicas:
            return min(self.replicas, max(count for _, count in self._wanted))
        return wanted

    def _limited(self, wanted: int, now: float) -> int:
        """Limits the change by the policies, from the number of replicas at the begin of their period."""
        rules = self._rules
        while self._changes and self._changes[0][0] <= now - max(rules.up_every_s, rules.down_every_s):
            self._changes.popleft()
        if wanted > self.replicas:
            added = sum(change for at_s, change in self._changes if change > 0 and at_s > now - rules.up_every_s)
            began = self.replicas - added
            return min(wanted, max(began + rules.up_pods, ceil(began * (1.0 + rules.up_share))))
        if wanted < self.replicas:
            removed = -sum(change for at_s, change in self._changes if change < 0 and at_s > now - rules.down_every_s)
            began = self.replicas + removed
            by_share = ceil(began * (1.0 - rules.down_share))
            least = by_share if rules.down_pods is None else min(by_share, began - rules.down_pods)
            return max(wanted, min(self.replicas, least))
        return self.replicas
