"""The page `/ui`, and its data below `/debug/`.

`GET /debug/live` is the current state as JSON, built at most once a second for all clients; with `?since=SECOND` it is
204 until there is a newer state. `GET /debug/history?span=900&columns=fleet/,band/` is the past as columns of 32-bit
floats. `GET /debug/requests` lists the last finished requests, or shows the history of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from struct import pack
from typing import Any

from aiohttp import web
from msgspec import to_builtins
from msgspec.structs import asdict

from llmproxy.config import Config
from llmproxy.config.changes import in_force
from llmproxy.core.token_bucket import TokenBucket
from llmproxy.gateway.admin.debug import (
    UI,
    UNSTORED,
    AdminPages,
    page_response,
    query_number,
    refusal,
    too_many_requests,
)
from llmproxy.gateway.admin.explained import choice_pages, terms_text
from llmproxy.gateway.admin.static import StaticFiles
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_fields import exit_fields, why_fields
from llmproxy.observe.live.history import TEN_S, TENS
from llmproxy.observe.live.minute import kind_of
from llmproxy.observe.live.recorder import Recorder
from llmproxy.observe.live.snapshot import LiveSnapshot, dumped, event_fields
from llmproxy.scheduling.attempt import Attempt

LIVE = "/debug/live"
HISTORY = "/debug/history"
REQUESTS = "/debug/requests"
CONFIG = "/debug/config"
EVENTS = "/debug/events"

SPAN_MAX_S = TENS * TEN_S
SPAN_S = 900
PAGES_PER_S = 20.0
BURST = 40.0  # The number of pages that all clients together may request at once after a pause.
REQUESTS_SHOWN = 100
REQUESTS_SEARCHED = 1_000
"""The number of remembered requests that a filter searches. Searching all of them takes too long."""
PREFIXES_MAX = 50
CHOICES_MAX = 20  # The maximum number of placement decisions shown for one request, the newest first.
SETTINGS_MAX = 5_000
FILTERS: dict[str, Callable[[RequestExit], Iterable[str | None]]] = {
    "outcome": lambda ended: (ended.outcome.value,),
    "kind": lambda ended: (kind_of(ended),),
    "model": lambda ended: (ended.model,),
    "tenant": lambda ended: (ended.tenant,),
    "key": lambda ended: (ended.key,),
    "client": lambda ended: (ended.client,),
    "band": lambda ended: (ended.band,),
    "backend": lambda ended: [attempt.backend for attempt in ended.tried] or (None,),
}
"""Filter name -> function that returns values of a request.

A request is shown if every given filter equals a value of the request. An empty filter matches None.
"""


class LivePages:
    """Serves the pages of this module. The caller must check first that the client may see them.

    `config` returns the configuration in force.
    """

    def __init__(
        self,
        recorder: Recorder,
        snapshot: LiveSnapshot,
        admin: AdminPages,
        config: Callable[[], Config],
        clock: Callable[[], float],
    ) -> None:
        self._recorder = recorder
        self._admin = admin
        self._config = config
        self._snapshot = snapshot
        self._clock = clock
        self._bucket = TokenBucket(BURST, PAGES_PER_S)
        self._static = StaticFiles()

        self.pages: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            LIVE: self._live,
            HISTORY: self._history,
            REQUESTS: self._requests,
            CONFIG: lambda _: self._configuration(),
            EVENTS: lambda _: self._events(),
        }

    def page(self, path: str) -> Callable[[web.BaseRequest], web.Response] | None:
        """Returns the handler of a path; None if this class does not serve the path."""
        return self._static.serve if path == UI or path.startswith(f"{UI}/") else self.pages.get(path)

    def _live(self, request: web.BaseRequest) -> web.Response:
        """Returns the current snapshot; 204 if the client already has it."""
        if request.query.get("since") == str(self._recorder.history.last_s):
            return web.Response(status=204, headers=UNSTORED)
        packed = "gzip" in request.headers.get("accept-encoding", "")
        headers = {**UNSTORED, "Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if packed else {})
        body = self._snapshot.document(packed=packed)
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _history(self, request: web.BaseRequest) -> web.Response:
        """Returns the last `?span=` seconds of the columns whose names begin with a prefix in `?columns=`.

        The body has three parts: the length of the head in 32 bits, the head (JSON, padded with blanks to a multiple of
        four bytes), and the columns one after the other. All numbers are little-endian.
        """
        if not self._bucket.try_take(1.0, self._clock()):
            return too_many_requests()
        span_s = query_number(request, "span", SPAN_S, SPAN_MAX_S)
        if span_s is None:
            return refusal(400, f"`span` should be an integer from 1 to {SPAN_MAX_S}, in seconds.")
        prefixes = request.query.get("columns", "").split(",")[:PREFIXES_MAX]
        found = self._recorder.history.read(prefixes, span_s)
        head = dumped({"names": found.names, "from_s": found.from_s, "step_s": found.step_s, "rows": found.rows})
        head += b" " * (-len(head) % 4)
        body = pack("<I", len(head)) + head + found.values
        return web.Response(body=body, content_type="application/octet-stream", headers=UNSTORED)

    def _requests(self, request: web.BaseRequest) -> web.Response:
        """Returns the last finished requests, newest first; with `?request=` the history of one request, or 404.

        `?limit=` bounds the list (1 to 100). Filters (see FILTERS) search the newest 1,000 requests.
        """
        now = self._clock()
        if not self._bucket.try_take(1.0, now):
            return too_many_requests()
        wanted = request.query.get("request")
        if wanted is not None:
            return self._story(wanted, now)
        limit = query_number(request, "limit", REQUESTS_SHOWN, REQUESTS_SHOWN)
        if limit is None:
            return refusal(400, f"`limit` should be an integer from 1 to {REQUESTS_SHOWN}.")
        chosen = [(values_of, request.query[name]) for name, values_of in FILTERS.items() if name in request.query]
        shown: list[dict[str, Any]] = []
        more = 0
        for ended in islice(self._recorder.recent.newest_first(), REQUESTS_SEARCHED):
            if any(all((one or "") != value for one in values_of(ended)) for values_of, value in chosen):
                continue
            if len(shown) < limit:
                shown.append(self._ended(ended, now))
            else:
                more += 1
        return page_response({"now_s": round(now, 3), "requests": shown, "more": more})

    def _events(self) -> web.Response:
        """Returns recent log lines about the proxy and its backends, newest first."""
        if not self._bucket.try_take(1.0, self._clock()):
            return too_many_requests()
        epoch_s = self._snapshot.epoch_s
        return page_response({"events": [event_fields(one, epoch_s) for one in self._recorder.events.newest_first()]})

    def _configuration(self) -> web.Response:
        """Returns the settings in force, and the source of each value. Secrets are `***`."""
        if not self._bucket.try_take(1.0, self._clock()):
            return too_many_requests()
        settings = in_force(self._config())
        shown = [to_builtins(one) for one in settings[:SETTINGS_MAX]]
        return page_response({"settings": shown, "more": len(settings) - len(shown)})

    def _story(self, wanted: str, now: float) -> web.Response:
        """Returns the history of one request: queue position, placement decisions, attempts and end."""
        pools = self._recorder.dispatcher.pools
        ended = self._recorder.recent.find(wanted)
        position = pools.position(wanted, now)
        pages = choice_pages(pools.choices(now), now, CHOICES_MAX, wanted)
        choices = [choice | {"pool": page["pool"]} for page in pages for choice in page["choices"]]
        if ended is None and position is None and not choices:
            return refusal(404, f"Nothing is remembered of a request `{wanted[:256]}`.")
        return page_response(
            {
                "now_s": round(now, 3),
                "request": wanted[:256],
                "waits": None if position is None else self._admin.position(position),
                "ended": None if ended is None else self._ended(ended, now),
                "attempts": [] if ended is None else [self._attempt(one, ended) for one in ended.tried],
                "waited": None if ended is None else self._waited(ended),
                "choices": choices,
            }
        )

    def _ended(self, ended: RequestExit, now: float) -> dict[str, Any]:
        fields = exit_fields(ended) | {"kind": kind_of(ended)}
        if ended.ended_s is not None:
            fields["ended_age_s"] = round(now - ended.ended_s, 3)
        return fields

    def _waited(self, ended: RequestExit) -> dict[str, Any] | None:
        """Returns since when and why a request waited, if it ended in the queue; None for other requests."""
        since_s, arrived_s = ended.queued_s, ended.arrived_s
        if since_s is None or arrived_s is None:
            return None
        waited = self._recorder.recent.waited(ended.request_id)
        return {"queued_s": round(since_s - arrived_s, 4)} | self._admin.waited(waited)

    def _attempt(self, attempt: Attempt, ended: RequestExit) -> dict[str, Any]:
        """Returns an attempt as fields of a page. Times are seconds since the arrival of the request."""
        fields: dict[str, Any] = to_builtins(asdict(attempt)) | {"error": attempt.error}
        arrived_s = ended.arrived_s or 0.0
        for name in ("queued_s", "granted_s", "first_byte_s", "ended_s"):
            if fields[name] is not None:
                fields[name] = round(fields[name] - arrived_s, 4)
        if attempt.why is not None:
            fields["why"] = why_fields(attempt.why) | self._admin.waited(attempt.why.waited)
        fields["terms"] = {name: round(value, 6) for name, value in attempt.terms}
        fields["price"] = terms_text(attempt.terms)
        return fields
