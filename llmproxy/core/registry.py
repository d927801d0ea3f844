"""Names of policies, as they stand in a configuration, to the code that makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., object])


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
