"""The session policy of vLLM production-stack."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import md5

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.lab.baselines.common import ImmediatePlacement
from llmproxy.lab.baselines.policy import Baseline, Surroundings, baselines

POINTS = 160
WINDOW_S = 60.0


class Ring:
    """A consistent hash ring (Karger et al., 1997) with `POINTS` points per backend, as in production-stack.

    `find` skips unavailable backends, which gives the same result as a ring of the available backends.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._known: dict[str, None] = {}

    def find(self, key: str, names: Sequence[str]) -> str:
        """Returns the owner of `key` among `names`, which must not be empty."""
        new = [name for name in names if name not in self._known]
        if new:
            self._known.update(dict.fromkeys(new))
            self._points += [(_point(f"{name}-{i}"), name) for name in new for i in range(POINTS)]
            self._points.sort()
        at, allowed = bisect_right(self._points, (_point(key), "")), frozenset(names)
        clockwise = (self._points[i % len(self._points)][1] for i in range(at, at + len(self._points)))
        return next(name for name in clockwise if name in allowed)


def _point(text: str) -> int:
    return int.from_bytes(md5(text.encode(), usedforsecurity=False).digest()[:8])


class SentRates:
    """The requests sent to each backend in the last `WINDOW_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent: deque[tuple[float, str]] = deque()
        self._counts: dict[str, int] = {}

    def sent(self, backend: str) -> None:
        self._forget_old()
        self._sent.append((self._clock(), backend))
        self._counts[backend] = self._counts.get(backend, 0) + 1

    def per_s(self, backend: str) -> float:
        self._forget_old()
        return self._counts.get(backend, 0) / WINDOW_S

    def _forget_old(self) -> None:
        since_s = self._clock() - WINDOW_S
        while self._sent and self._sent[0][0] <= since_s:
            _, backend = self._sent.popleft()
            self._counts[backend] -= 1


class Session(ImmediatePlacement):
    """Takes the owner of the session's key on a hash ring; without a session, the backend with the lowest request rate.

    The rate counts all requests that this router sent. Of equal backends, the first is chosen.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._ring = Ring()
        self._rates = SentRates(around.clock)

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        session = self._around.prompts[request.id].session
        if session is not None:
            return Placed(self._ring.find(session, [view.backend for view in views]), 0.0, (), len(views))
        rate, _, backend = min((self._rates.per_s(view.backend), i, view.backend) for i, view in enumerate(views))
        return Placed(backend, -rate, (("sent_per_s", rate),), len(views))

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        self._rates.sent(placed.backend)


@baselines.register("session")
def session() -> Baseline:
    about = "consistent hashing of the session, lowest sent rate of 60 s without one (vLLM production-stack)"
    return Baseline("session", about, Session)
