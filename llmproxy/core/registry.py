"""Names of policies, as they stand in a configuration, to the code that makes one; and what one raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., object])
FAULTS_MAX = 100
"""How many faults are kept until somebody asks for them."""


class Faults:
    """What policies raised. A policy may be a plugin: its fault must not undo the accounts of others."""

    def __init__(self) -> None:
        self._noted: list[Exception] = []

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

    def take(self) -> list[Exception]:
        """The faults noted since this was last asked."""
        noted, self._noted = self._noted, []
        return noted

    def __bool__(self) -> bool:
        return bool(self._noted)


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
