"""A fleet with an autoscaler: its serving, starting and leaving replicas, and its cost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf

from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Autoscale
from llmproxy.lab.scaling.hpa import Hpa
from llmproxy.lab.scaling.signals import SIGNALS, Look

ZERO_ASK_S = 5.0
"""Interval of the autoscaler for a fleet without replicas: `pollingInterval` in the exported KEDA manifests."""


class ScaledFleet:
    """Starts and ends `servers` as the autoscaler decides.

    A replica costs from the decision to start it until its end. A leaving replica completes its running requests.
    """

    def __init__(self, autoscale: Autoscale, servers: Mapping[str, SimulatedServer]) -> None:
        self.autoscale = autoscale
        self.signal = SIGNALS[autoscale.policy]
        self._servers = dict(servers)
        self._hpa = Hpa(self.signal.rules, autoscale.min, len(servers))
        self._starting: dict[str, asyncio.TimerHandle] = {}
        self._serving: list[str] = []
        self._leaving: set[str] = set()
        self.trail: list[tuple[float, int, int]] = []  # (Second, wanted, serving replicas) at each reading.
        self.cost_s = 0.0
        self._looked_s: float | None = None

    @property
    def up(self) -> int:
        return len(self._serving)

    @property
    def asked(self) -> int:
        return self._hpa.replicas

    @property
    def ask_s(self) -> float:
        """The seconds until the autoscaler reads its signal again."""
        return self.autoscale.ask_s if self.asked else min(ZERO_ASK_S, self.autoscale.ask_s)

    def begin(self) -> None:
        for name in list(self._servers)[: self.autoscale.min]:
            self._serving.append(name)
            self._servers[name].start()

    def look(self, look: Look, loop: asyncio.AbstractEventLoop) -> None:
        """Starts or removes replicas as the autoscaler's signal says."""
        self._count(look.now)
        wanted = self._hpa.follow(self.signal.value(look), self.signal.target, look.now)
        have = len(self._serving) + len(self._starting)
        for _ in range(wanted - have):
            self._add(loop)
        for _ in range(have - wanted):
            self._remove()
        self.trail.append((look.now, wanted, len(self._serving)))

    def end(self, now: float) -> None:
        self._count(now)
        for timer in self._starting.values():
            timer.cancel()

    def _count(self, now: float) -> None:
        self._leaving = {name for name in self._leaving if self._servers[name].alive}
        if self._looked_s is not None:
            self.cost_s += (now - self._looked_s) * (len(self._serving) + len(self._starting) + len(self._leaving))
        self._looked_s = now

    def _add(self, loop: asyncio.AbstractEventLoop) -> None:
        free = [
            name for name in self._servers
            if name not in self._serving and name not in self._starting and name not in self._leaving
        ]  # fmt: skip
        if free:
            self._starting[free[0]] = loop.call_later(self.autoscale.start_s, self._started, free[0])

    def _started(self, name: str) -> None:
        del self._starting[name]
        self._serving.append(name)
        self._servers[name].start()

    def _remove(self) -> None:
        """Cancels the newest starting replica, or if none is starting, drains the newest serving one."""
        if self._starting:
            name, timer = self._starting.popitem()
            timer.cancel()
        elif self._serving:
            name = self._serving.pop()
            self._leaving.add(name)
            self._servers[name].roll(inf)
