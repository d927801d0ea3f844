"""The backends of one pool, and the outlier detection that compares them."""

from __future__ import annotations

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.batch_limit import Exploration
from llmproxy.core.backends.health import Peers
from llmproxy.core.backends.outlier_detection import OutlierDetection
from llmproxy.core.backends.view import View
from llmproxy.core.settings import HealthSettings


class PoolBackends:
    """The backends of one pool in the order in which they joined it, and the state that they share."""

    def __init__(self, settings: HealthSettings) -> None:
        self.by_name: dict[str, Backend] = {}
        self._peers = Peers(settings.ejected_ratio_max)
        self.outliers = OutlierDetection(settings, self._peers)
        self._exploration = Exploration()
        self._index: dict[str, int] = {}

    def reconfigure(self, settings: HealthSettings) -> None:
        self._peers.ejected_ratio_max = settings.ejected_ratio_max
        self.outliers.reconfigure(settings)

    def add(self, backend: Backend) -> None:
        self.by_name[backend.name] = backend
        backend.health.peers = self._peers
        backend.exploration = self._exploration
        backend.outliers = self.outliers
        self._exploration.members[backend.name] = backend
        self._peers.members[backend.name] = backend.health
        self._changed()

    def remove(self, name: str) -> None:
        backend = self.by_name.pop(name)
        backend.exploration = backend.outliers = None
        del self._exploration.members[name]
        self._peers.members.pop(name).peers = None
        self._changed()

    def _changed(self) -> None:
        self._exploration.refresh()
        self._index = {name: index for index, name in enumerate(self.by_name)}

    def any_up(self) -> bool:
        """Returns whether any backend is up, even if full or ejected."""
        for backend in self.by_name.values():
            health = backend.health
            if not (health.down or health.drained):
                return True
        return False

    def views(self, now: float) -> list[View]:
        views = []
        for backend in self.by_name.values():
            view = backend.cached_view
            views.append(backend.make_view(now) if view is None or now >= backend.view_until_s else view)
        return views

    def refresh(self, views: list[View], backend: Backend, now: float) -> None:
        """Replaces the view of `backend` in a list that `views()` returned."""
        views[self._index[backend.name]] = backend.view(now)

    def eject_outliers(self, now: float) -> list[int]:
        """Ejects backends that hang or have become slow.

        Returns the leases to revoke, as chosen by `OutlierDetection.give_up`. Their requests can be retried, or their
        streams continued, on other backends.
        """
        hung, slow = self.outliers.outliers(now)
        leases: list[int] = []
        for name, silent in hung.items():
            if self.by_name[name].eject_hung(silent, now):
                leases += self.outliers.give_up(name, silent, now)
        for name, why in slow.items():
            self.by_name[name].eject_slow(why, now)
        return leases

    def changes_at(self, now: float) -> float | None:
        """Returns when a view or an outlier may change without an event; None if only events can change them."""
        times = [self.outliers.due_s, *(backend.changes_at(now) for backend in self.by_name.values())]
        return min([time for time in times if time is not None], default=None)

    def check(self) -> None:
        self.outliers.check()
        for backend in self.by_name.values():
            backend.check()
