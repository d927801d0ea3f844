"""Which clients may come in: one of the configured keys, compared in constant time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest

from llmproxy.core.domain import Outcome
from llmproxy.gateway.errors import Failure


class Keys:
    """The client keys, kept as digests so that no dump or log of this object shows one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise Failure (401) unless no keys are configured or the request presents one of them.

        The key is a bearer token, as OpenAI's clients send it, or stands in `x-api-key`, as Anthropic's send it.
        """
        if not self._digests:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = sha256(given.encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, so that the time taken does not tell which one was close.
        if sum(compare_digest(digest, known) for known in self._digests) == 0:
            message = "Missing or wrong API key: send one that this proxy accepts as `Authorization: Bearer KEY`."
            raise Failure(Outcome.UNAUTHORIZED, message, headers={"WWW-Authenticate": "Bearer"})
