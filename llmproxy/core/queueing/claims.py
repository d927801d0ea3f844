"""The waiting requests that a placement assigned to backends without room."""

from __future__ import annotations

from llmproxy.core.domain import NoMatch, Request


class Claims:
    """The waiting requests of a pool that a placement assigned to full or closed backends (`NoMatch.later`).

    A claim ends when its request leaves its flow or claims another backend. Blocked requests have no claims.
    """

    def __init__(self) -> None:
        self.backends: dict[str, str] = {}
        """Request id -> the backend for which the request waits."""
        # Request id -> (band, seconds of its prompt, time of its first claim).
        self._own: dict[str, tuple[int, float, float]] = {}
        # Backend -> band -> (number of requests, seconds of their prompts).
        self._sums: dict[str, dict[int, tuple[int, float]]] = {}

    def add(self, request: Request, found: NoMatch, now: float) -> None:
        """Records that `request` waits for the backend `found.later`, and for no other."""
        if request.id in self.backends:
            # It waited for another backend.
            now = self._own[request.id][2]
            self.drop(request.id)
        bands = self._sums.setdefault(found.later, {})
        count, prompts_s = bands.get(request.band, (0, 0.0))
        bands[request.band] = count + 1, prompts_s + found.prefill_s
        self.backends[request.id], self._own[request.id] = found.later, (request.band, found.prefill_s, now)

    def drop(self, request_id: str) -> None:
        backend, (band, prefill_s, _) = self.backends.pop(request_id), self._own.pop(request_id)
        bands = self._sums[backend]
        count, prompts_s = bands[band]
        if count > 1:
            bands[band] = count - 1, prompts_s - prefill_s
        elif len(bands) > 1:
            del bands[band]
        else:
            del self._sums[backend]

    def others(self, request: Request, backend: str) -> tuple[int, float]:
        """Returns how many other requests of its band and above wait for `backend`, and the seconds of their prompts.

        Any of them may get the backend before `request`: fairness and ordering decide about that later.
        """
        count, prompts_s = 0, 0.0
        for band, (requests, seconds) in self._sums.get(backend, {}).items():
            if band >= request.band:
                count, prompts_s = count + requests, prompts_s + seconds
        if count and self.backends.get(request.id) == backend:
            count, prompts_s = count - 1, prompts_s - self._own[request.id][1]
        return count, max(0.0, prompts_s)

    def waited_s(self, request: Request, backend: str, now: float) -> float:
        """Returns for how long `request` has waited for backends without room, 0 if it does not wait for `backend`."""
        return now - self._own[request.id][2] if self.backends.get(request.id) == backend else 0.0
