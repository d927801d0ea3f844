"""Names of policies, as they stand in a configuration, to the code that makes one; and what one raises."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., object])
FAULTS_MAX = 100
"""How many faults are kept until somebody asks for them."""
FAULT_TELL_S = 1.0
"""Between two stories of a policy that raises at the same place: it may do so with every token."""


class Faults:
    """What policies raised. A policy may be a plugin: its fault must not undo the accounts of others."""

    def __init__(self) -> None:
        self._noted: list[Exception] = []
        self._told: dict[tuple[str, int], tuple[float, int]] = {}

    def tell(self, hear: Callable[..., None], *event: object) -> None:
        """Tell a policy of an event that has happened already, whatever the policy makes of it."""
        try:
            hear(*event)
        except Exception as fault:  # noqa: BLE001 - see above
            self.note(fault)

    def note(self, fault: Exception) -> None:
        """Keep a fault for whoever asks; beyond FAULTS_MAX it is forgotten."""
        if len(self._noted) < FAULTS_MAX:
            self._noted.append(fault)

    def take(self, now: float) -> list[tuple[Exception, int]]:
        """The faults noted since this was last asked, but one each FAULT_TELL_S for each line of code that raises.

        With each comes how many of that line were left out since the last.
        """
        noted, self._noted = self._noted, []
        told: list[tuple[Exception, int]] = []
        for fault in noted:
            place = _place(fault)
            told_s, untold = self._told.get(place, (-inf, 0))
            if now - told_s < FAULT_TELL_S:
                self._told[place] = told_s, untold + 1
            else:
                self._told[place] = now, 0
                told.append((fault, untold))
        return told

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
        """Return a decorator that files its subject under `name`. Raises ValueError when the name is taken."""

        def file(factory: Factory) -> Factory:
            if name in self._factories:
                raise ValueError(f"{self._kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return file

    def get(self, name: str) -> Factory:
        """The factory filed under `name`. Raises ValueError naming the known ones."""
        try:
            return self._factories[name]
        except KeyError:
            raise ValueError(f"unknown {self._kind} {name!r}; known: {', '.join(self.names())}") from None

    def names(self) -> tuple[str, ...]:
        """In the order in which they were filed."""
        return tuple(self._factories)
