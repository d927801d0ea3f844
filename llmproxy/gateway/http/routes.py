"""The table of scheduled routes, and other paths. A path neither here nor in `pages` does not exist for clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class BodyKind(StrEnum):
    """The format of a route's request body, which determines how the proxy reads it.

    The proxy can ask `CHAT` and `COMPLETION` streams for usage. `OTHER` is any other JSON body. The engine accepts any
    value of `stream` there, so the proxy does too. `FORM` is multipart/form-data.
    """

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"
    FORM = "form"


class Dialect(StrEnum):
    """The format of errors on a route."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class Work(StrEnum):
    """The engine's work for a request, which determines the tokens that are charged.

    The numbers of tokens come from the `usage` in the answer. Without `usage`, they come from the estimate.
    """

    # The engine computes the prompt and generates tokens.
    GENERATES = "prompt and answer"
    # The engine computes the prompt only.
    READS = "prompt"
    # The engine runs no model. Such a request is free: the client may have made up the numbers in its answer.
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Route:
    """A scheduled route: its method, the kind of its bodies, and the work of its requests."""

    path: str
    kind: BodyKind = BodyKind.OTHER
    dialect: Dialect = Dialect.OPENAI
    work: Work = Work.GENERATES
    method: str = "POST"
    # Whether vLLM accepts a `cache_salt` in the body.
    salted: bool = False
    # Whether the engine computes the prompt and adds it to its prefix cache.
    computes: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "computes", self.work is not Work.NOTHING)


SCHEDULED: dict[str, Route] = {
    route.path: route
    for route in (
        Route("/v1/chat/completions", BodyKind.CHAT, salted=True),
        Route("/v1/completions", BodyKind.COMPLETION, salted=True),
        Route("/v1/responses", BodyKind.RESPONSES, Dialect.RESPONSES, salted=True),
        Route("/v1/messages", BodyKind.MESSAGES, Dialect.ANTHROPIC, salted=True),
        Route("/v1/messages/count_tokens", BodyKind.MESSAGES, Dialect.ANTHROPIC, Work.NOTHING),
        Route("/v1/embeddings", work=Work.READS, salted=True),
        Route("/v2/embed", work=Work.READS),
        Route("/pooling", work=Work.READS, salted=True),
        Route("/classify", work=Work.READS),
        Route("/score", work=Work.READS, salted=True),
        Route("/v1/score", work=Work.READS, salted=True),
        Route("/rerank", work=Work.READS, salted=True),
        Route("/v1/rerank", work=Work.READS, salted=True),
        Route("/v2/rerank", work=Work.READS, salted=True),
        Route("/tokenize", work=Work.NOTHING),
        Route("/detokenize", work=Work.NOTHING),
        Route("/tokenizer_info", work=Work.NOTHING, method="GET"),
        Route("/generative_scoring", work=Work.READS, salted=True),
        Route("/v1/systemone", salted=True),
        Route("/v1/chat/completions/batch", salted=True),
        Route("/v1/chat/completions/render", work=Work.NOTHING),
        Route("/v1/completions/render", work=Work.NOTHING),
        Route("/v1/messages/render", BodyKind.MESSAGES, Dialect.ANTHROPIC, Work.NOTHING),
        Route("/v1/responses/render", work=Work.NOTHING),
        Route("/v1/chat/completions/derender", work=Work.NOTHING),
        Route("/v1/completions/derender", work=Work.NOTHING),
        Route("/inference/v1/generate", salted=True),
        Route("/v1/audio/transcriptions", BodyKind.FORM),
        Route("/v1/audio/translations", BodyKind.FORM),
        Route("/v1/audio/speech"),
    )
}

EXTERNAL = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
"""The routes whose requests may go to an external backend (a paid API, for overflow)."""
STORED_RESPONSES = "/v1/responses/"
"""`GET {id}` and `POST {id}/cancel` below this path go to the backend that made the response."""

LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

METRICS = "/metrics"
MODELS = "/v1/models"
USAGE = "/v1/usage"  # The use and the limits of the client's own tenant.
ROOT = "/"
PING = "/ping"


def is_administrative(path: str) -> bool:
    """Returns whether a path is for operators and not for clients."""
    if path.startswith(("/debug/", "/admin/", "/scale/", "/ui/")):
        return True
    return path in (METRICS, LOAD_ADAPTER, UNLOAD_ADAPTER, "/debug", "/admin", "/scale", "/ui")


def error_dialect(path: str) -> Dialect:
    """Returns the format of errors on `path`. The path need not exist."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    return Dialect.OPENAI
