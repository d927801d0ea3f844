"""Stored responses live in the engine that made them: which backend that is, for a bounded number of ids."""

from __future__ import annotations

import re
from collections import OrderedDict

IDS_MAX = 10_000
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,256})"')


class StoredResponses:
    """Response id -> backend name; the ids least recently made are forgotten first."""

    def __init__(self) -> None:
        self._made_by: OrderedDict[str, str] = OrderedDict()

    def remember(self, head: bytes, backend: str) -> None:
        """Note the id that stands in the first bytes of a `/v1/responses` answer."""
        found = _ID.search(head)
        if found is None:
            return
        self._made_by[found[1].decode()] = backend
        if len(self._made_by) > IDS_MAX:
            self._made_by.popitem(last=False)

    def backend_of(self, response_id: str) -> str | None:
        return self._made_by.get(response_id)
