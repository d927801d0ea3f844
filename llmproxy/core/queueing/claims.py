"""The waiting requests that a placement assigned to backends without room."""

from __future__ import annotations

from llmproxy.core.domain import NoMatch, Request


class Claims:
    """The waiting requests of a pool that a placement assigned to full or closed backends (`NoMatch.later`).

    A claim ends when its request leaves its flow or claims another backend. Blocked requests have no claims.
    """

    def __init__(self) -> None:
        self.by_backend: dict[str, dict[str, tuple[int, float]]] = {}
        """Backend -> (request id -> (band, seconds of its prompt)), in the order of the claims."""
        self._backends: dict[str, str] = {}  # Request id -> backend.

    def add(self, request: Request, found: NoMatch) -> None:
        """Records that `request` waits for the backend `found.later`, and for no other."""
        if request.id in self._backends:
            # It waited for another backend.
            self.drop(request.id)
        self._backends[request.id] = found.later
        self.by_backend.setdefault(found.later, {})[request.id] = request.band, found.prefill_s

    def drop(self, request_id: str) -> None:
        backend = self._backends.pop(request_id)
        claims = self.by_backend[backend]
        del claims[request_id]
        if not claims:
            del self.by_backend[backend]

    def before(self, request: Request, backend: str) -> tuple[int, float]:
        """Returns the number of claims on `backend` before the claim of `request`, and the seconds of their prompts.

        Claims of lower bands are not counted. Without a claim, `request` comes after all claims.
        """
        count, prompts_s = 0, 0.0
        for request_id, (band, prefill_s) in self.by_backend.get(backend, {}).items():
            if request_id == request.id:
                break
            if band >= request.band:
                count += 1
                prompts_s += prefill_s
        return count, prompts_s
