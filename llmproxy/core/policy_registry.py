"""Registries of policies by their configured names, and a collector of the exceptions that policies raise."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., object])
FAULTS_MAX = 100  # Maximum number of exceptions that wait for `Faults.take`.
FAULT_REPORT_S = 1.0  # Minimum time between two reports of the same line of code, which may raise with every token.


class Faults:
    """Collects the exceptions of policies, because a plugin must not corrupt the core's state."""

    def __init__(self) -> None:
        self.noted: list[Exception] = []
        self._reported: dict[tuple[str, int], tuple[float, int]] = {}

    def notify(self, hook: Callable[..., None], *event: object) -> None:
        """Calls a hook of a policy for an event. An exception of the hook is collected and not raised."""
        try:
            hook(*event)
        except Exception as fault:  # noqa: BLE001 - see the class
            self.note(fault)

    def note(self, fault: Exception) -> None:
        """Stores an exception for `take`; drops it if FAULTS_MAX are stored."""
        if len(self.noted) < FAULTS_MAX:
            self.noted.append(fault)

    def take(self, now: float) -> list[tuple[Exception, int]]:
        """Returns the exceptions since the last call, each line of code once in FAULT_REPORT_S.

        Each exception comes with the number of exceptions of its line that were omitted before.
        """
        noted, self.noted = self.noted, []
        reported: list[tuple[Exception, int]] = []
        for fault in noted:
            place = _place(fault)
            reported_s, omitted = self._reported.get(place, (-inf, 0))
            if now - reported_s < FAULT_REPORT_S:
                self._reported[place] = reported_s, omitted + 1
            else:
                self._reported[place] = now, 0
                reported.append((fault, omitted))
        return reported

    def __bool__(self) -> bool:
        return bool(self.noted)


def _place(fault: Exception) -> tuple[str, int]:
    """Returns the file and the line that raised `fault`, which tell exceptions apart."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


class Registry(Generic[Factory]):
    """The named factories of one kind of policy."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._factories: dict[str, Factory] = {}

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Returns a decorator that registers a factory under `name`. Raises ValueError if the name is taken."""

        def add(factory: Factory) -> Factory:
            if name in self._factories:
                raise ValueError(f"{self._kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return add

    def get(self, name: str) -> Factory:
        """Returns the factory registered under `name`. Raises ValueError with the known names."""
        try:
            return self._factories[name]
        except KeyError:
            raise ValueError(f"unknown {self._kind} {name!r}; known: {', '.join(self.names())}") from None

    def names(self) -> tuple[str, ...]:
        return tuple(self._factories)
