"""A collection of Kubernetes objects, listed and then watched.

Kubernetes' page "API concepts" describes the protocol. The watch begins at the version of the list, and each event and
bookmark has a later version. When a watch ends, the next watch begins at the last version. If the server no longer has
that version (410), the collection is listed again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from llmproxy.backends.kubernetes.api import ANSWER_S, SILENCE_S, ApiError, KubernetesApi
from llmproxy.backends.kubernetes.objects import Metadata
from llmproxy.backends.source import RefusedLog

WATCH_S = 290  # For how many seconds the server is asked to keep a watch open.
PAUSE_MIN_S, PAUSE_MAX_S = 0.2, 30.0
LIST_BYTES_MAX = 256 << 20
EVENT_BYTES_MAX = 8 << 20
GONE = 410


class Named(Protocol):
    @property
    def metadata(self) -> Metadata: ...


T = TypeVar("T", bound=Named)


class _Metadata(Struct, rename="camel", frozen=True):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class _List(Struct, frozen=True):
    metadata: _Metadata
    items: list[msgspec.Raw] | None = None


class _Event(Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Bookmark(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    code: int = 0
    message: str = ""


class _Unread(Struct, frozen=True):
    """The names of an object that could not be decoded."""

    metadata: _Metadata = _Metadata()


class Watched(Generic[T]):
    """The objects at one path of the Kubernetes API, kept current while `run` runs.

    An invalid object is logged, and its last valid version stays. While the API server does not answer, all objects
    stay. `on_change` is called after every change of `objects` or `trouble`.

    Attributes:
        objects: Maps (namespace, name) to an object; None before the first list.
        trouble: Why the last list or watch failed; None after a success. A watch that breaks later is no failure.
        status: The HTTP status of `trouble`; 0 without an answer.
        refused: Maps (namespace, name) of an invalid object to the reason.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        query: Mapping[str, str],
        kind: type[T],
        on_change: Callable[[], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        self.objects: dict[tuple[str, str], T] | None = None
        self.trouble: str | None = None
        self.status = 0
        self._api = api
        self._path = path
        self._query = dict(query)
        self._decoder = msgspec.json.Decoder(kind)
        self._on_change = on_change
        self._silence_s = silence_s
        self._version: str | None = None
        self._following = False
        self._pause_s = PAUSE_MIN_S
        self.refused: dict[tuple[str, str], str] = {}
        self._log = RefusedLog()

    async def run(self) -> None:
        """Watches the collection until cancelled. Retries after every failure."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._follow()
            except ApiError as error:
                if error.status == GONE:
                    self._version = None
                elif not (error.cut and self._following):
                    # A cut watch counts as ended. The next request shows whether the server is away.
                    self._set_trouble(str(error), error.status)
            except (msgspec.MsgspecError, RecursionError) as error:
                # Later events refer to objects that could not be read, so the collection is listed again.
                self._version = None
                self._set_trouble(f"{self._path} cannot be read: {error}")
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    async def _list(self) -> None:
        body, self._following = bytearray(), False
        async with self._api.get(self._path, self._query, ANSWER_S) as content:
            while chunk := await content.readany():
                body += chunk
                if len(body) > LIST_BYTES_MAX:
                    raise ApiError(f"{self._path} has more than {LIST_BYTES_MAX >> 20} MiB")
        listed = msgspec.json.decode(body, type=_List)
        before, self.objects = self.objects or {}, {}
        self.refused.clear()
        for item in listed.items or ():
            self._take(item, before)
        self._log_refused()
        self._version, self.trouble, self.status = listed.metadata.resource_version, None, 0
        self._on_change()

    async def _follow(self) -> None:
        """Applies the events of one watch until it ends.

        Raises ApiError, with status 410 if the server no longer has the version, and MsgspecError for a bad event.
        """
        watch = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        version = {"resourceVersion": self._version or ""}
        self._following = True
        async with self._api.get(self._path, self._query | watch | version, self._silence_s) as content:
            self._set_trouble(None)
            rest = b""
            while chunk := await content.readany():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > EVENT_BYTES_MAX:
                    self._version = None
                    raise ApiError(f"an event of {self._path} has more than {EVENT_BYTES_MAX >> 20} MiB")
                changed = [self._apply(line) for line in lines if line]
                if changed:
                    self._pause_s = PAUSE_MIN_S
                if any(changed):
                    self._on_change()

    def _apply(self, line: bytes) -> bool:
        """Applies one event of a watch. Returns whether an object changed. Raises ApiError for an error event."""
        event = msgspec.json.decode(line, type=_Event)
        if event.type in ("BOOKMARK", "ERROR"):
            told = msgspec.json.decode(event.object, type=_Bookmark)
            if event.type == "ERROR":
                raise ApiError(f"the watch of {self._path} ended: {told.message or told.code}", told.code)
            self._version = told.metadata.resource_version or self._version
            return False
        assert self.objects is not None, "it was listed before"
        self._version = self._take(event.object, self.objects, deleted=event.type == "DELETED") or self._version
        self._log_refused()
        return True

    def _take(self, raw: msgspec.Raw, before: Mapping[tuple[str, str], T], *, deleted: bool = False) -> str:
        """Adds, replaces or removes one object. Returns its resource version; "" if the object has none.

        If the object is invalid, the object of this name in `before` stays.
        """
        assert self.objects is not None
        found: T | _Unread
        try:
            found, why = self._decoder.decode(raw), ""
        except msgspec.ValidationError as error:
            found, why = _unread(raw), str(error)
        metadata = found.metadata
        key = metadata.namespace, metadata.name
        known = before.get(key) if isinstance(found, _Unread) else found
        self.objects.pop(key, None)
        self.refused.pop(key, None)
        if not deleted and known is not None:
            self.objects[key] = known
        if not deleted and why:
            self.refused[key] = why
        return metadata.resource_version

    def _log_refused(self) -> None:
        self._log.log(self._path, {"/".join(key): why for key, why in self.refused.items()})

    def _set_trouble(self, trouble: str | None, status: int = 0) -> None:
        if trouble != self.trouble:
            self.trouble, self.status = trouble, status
            self._on_change()


def _unread(raw: msgspec.Raw) -> _Unread:
    try:
        return msgspec.json.decode(raw, type=_Unread)
    except msgspec.ValidationError:
        return _Unread()
