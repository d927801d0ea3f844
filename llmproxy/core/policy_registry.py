"""Registries of policies by their configured names, and the exceptions that policies raise."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., object])
FAULTS_MAX = 100
"""Faults that are kept until they are taken."""
FAULT_REPORT_S = 1.0
"""Between two reports of the same line of code: a policy may raise with every token."""


class Faults:
    """Exceptions of policies. A policy may be a plugin, so its fault must not break the accounts of the core."""

    def __init__(self) -> None:
        self._noted: list[Exception] = []
        self._reported: dict[tuple[str, int], tuple[float, int]] = {}

    def notify(self, hook: Callable[..., None], *event: object) -> None:
        """Call a hook of a policy for an event that has happened; an exception is noted and not raised."""
        try:
            hook(*event)
        except Exception as fault:  # noqa: BLE001 - see above
            self.note(fault)

    def note(self, fault: Exception) -> None:
        """Keep a fault until it is taken; beyond FAULTS_MAX it is dropped."""
        if len(self._noted) < FAULTS_MAX:
            self._noted.append(fault)

    def take(self, now: float) -> list[tuple[Exception, int]]:
        """The faults since the last call, at most one each FAULT_REPORT_S per line of code that raised.

        Each comes with the number of faults of that line that were left out before it.
        """
        noted, self._noted = self._noted, []
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
        return bool(self._noted)


def _place(fault: Exception) -> tuple[str, int]:
    """The file and the line that raised it."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


class Registry(Generic[Factory]):
    """A closed set of named factories of one kind of policy."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._factories: dict[str, Factory] = {}

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Return a decorator that registers its subject under `name`. Raises ValueError when the name is taken."""

        def file(factory: Factory) -> Factory:
            if name in self._factories:
                raise ValueError(f"{self._kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return file

    def get(self, name: str) -> Factory:
        """The factory registered under `name`. Raises ValueError naming the known ones."""
        try:
            return self._factories[name]
        except KeyError:
            raise ValueError(f"unknown {self._kind} {name!r}; known: {', '.join(self.names())}") from None

    def names(self) -> tuple[str, ...]:
        """In the order of their registration."""
        return tuple(self._factories)
