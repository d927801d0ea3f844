"""The two stages of a split request (prefill, then decode): the handover between them, and how each stage fails.

The client gets no byte of the answer before the decode stage has sent a token. Until then, a request whose stage fails
usually starts again, split or whole, so the failure costs only time. `decide_stage_retry` has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog

from llmproxy.core.domain import Grant, Outcome, Stage, Usage, Verdict
from llmproxy.core.kv_connectors import NotHandedOver, Parameters
from llmproxy.core.retry import Again, Cause
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.scheduling.attempt import Attempt, Split
from llmproxy.scheduling.lease import Lease

OPENING_EVENTS: Mapping[BodyKind, int] = {BodyKind.CHAT: 1, BodyKind.RESPONSES: 2, BodyKind.MESSAGES: 1}
"""The number of events that only announce a stream.

An engine sends these events before it knows whether it can fetch the KV cache of the prompt.
"""
WARNINGS_MAX = 1_000  # The maximum number of different warnings (cause and backend). Each is logged once.
PREFILL_LIMIT_S, PREFILL_LATE = 30.0, 5.0
"""A prefill may take 30 s, or 5 times the predicted p90 of the time to first token if that is longer.

A prefill has no stream whose silence would show that the backend hangs.
"""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HINTS = {
    Split.NO_PARAMETERS: "start it with --kv-transfer-config, or give it the role both",
    Split.BAD_PARAMETERS: "all backends of a pool should run the same version of the engine and of its KV connector",
    Split.LATE: "add decode backends, or raise kv_lease_s if the engines keep prompts longer",
    Split.UNREACHABLE: "set VLLM_NIXL_SIDE_CHANNEL_HOST of that engine to an address that other machines reach",
    Split.TRANSFER_FAILED: "see the log of that engine, and whether it reaches the side channel of the other one",
}

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Handover:
    """The result of a prefill, which the decode stage needs."""

    # The backend that computed the prompt, and its base URL.
    backend: str
    url: str
    parameters: Parameters
    # When the prefill ended, in seconds on the event loop's clock.
    at_s: float
    # The backend that is reserved for the decode stage; None if none is reserved.
    answers_on: str | None = None

    def too_late(self, now: float) -> bool:
        """Returns whether the prefill engine may already have freed the KV blocks."""
        return self.parameters.age_max_s is not None and now - self.at_s > self.parameters.age_max_s

    def unreachable_from(self, url: str) -> bool:
        """Returns whether the engine at `url` cannot reach the prefill engine.

        This is so if the prefill engine gave a loopback address and the engine at `url` is on another machine.
        """
        first, second = urlsplit(self.url).hostname, urlsplit(url).hostname
        same = first == second or {first, second} <= _LOOPBACK
        return self.parameters.host in _LOOPBACK and not same


def prefill_limit_s(grant: Grant) -> float:
    """Returns how many seconds the prefill of a grant may take."""
    predicted = grant.placed.ttft
    return max(PREFILL_LIMIT_S, PREFILL_LATE * (0.0 if predicted is None else predicted.p90_s))


def fail_handover(attempt: Attempt, error: NotHandedOver) -> None:
    """Fails a prefill attempt whose answer has no usable transfer parameters."""
    attempt.detail = error.message
    attempt.split = Split.NO_PARAMETERS if error.missing else Split.BAD_PARAMETERS
    message = "The backend did not say where the KV cache of the prompt is."
    attempt.fail(Outcome.UPSTREAM_STATUS, Cause.NOT_TRANSFERRED, message)
    attempt.status, attempt.unsplit = 502, True


def refuse_unreachable(attempt: Attempt, handover: Handover, lease: Lease) -> None:
    """Fails a decode attempt without a call, because its backend cannot reach the prefill engine."""
    attempt.split, attempt.unsplit, attempt.status = Split.UNREACHABLE, True, 502
    host = handover.parameters.host
    attempt.detail = f"{handover.backend} names {host} as its host, and {lease.backend} is on another machine"
    message = "The backend cannot fetch the KV cache from the backend that computed the prompt."
    attempt.fail(Outcome.UPSTREAM_STATUS, Cause.NOT_TRANSFERRED, message)
    lease.verdict, lease.usage = attempt.verdict, Usage(0, 0)


def decide_stage_retry(attempt: Attempt, stage: Stage) -> None:
    """Decides whether a failed prefill or decode stage is retried split, retried on one backend, or not retried.

    Sets `attempt.split`, `attempt.unsplit` and `attempt.again`. Does nothing for a stage that succeeded, whose answer
    has begun, or whose `attempt.split` is already set.
    """
    if attempt.committed or attempt.outcome in (Outcome.COMPLETED, Outcome.INTERNAL) or attempt.split is not None:
        return
    # An error answer of the engine may concern the stage alone: the whole request may succeed.
    said, failed = attempt.outcome is Outcome.UPSTREAM_STATUS, attempt.verdict is Verdict.FAILED
    refused = said and attempt.verdict is Verdict.SERVED
    if stage is Stage.PREFILL:
        attempt.split = Split.PREFILL_REFUSED if refused else Split.PREFILL_FAILED
        attempt.unsplit = refused
        if attempt.again is Again.NO:
            attempt.again = Again.ELSEWHERE
        return
    attempt.split = Split.DECODE_REFUSED if refused else Split.DECODE_FAILED
    attempt.unsplit = refused
    if said and failed:
        # The error does not mention the KV cache, so either backend may have failed.
        attempt.verdict, attempt.split, attempt.unsplit = Verdict.TRANSFER_FAILED, Split.TRANSFER_FAILED, True


class Warnings:
    """Logs a warning when a stage of a split request fails, once for each cause and backend."""

    def __init__(self) -> None:
        self._written: dict[tuple[Split, str], None] = {}

    def note(self, split: Split, backend: str, attempt: Attempt) -> None:
        if (split, backend) in self._written or len(self._written) >= WARNINGS_MAX:
            return
        self._written[split, backend] = None
        why = attempt.detail or attempt.message or None
        fields = {"why": why, "hint": _HINTS.get(split)}
        known = {name: value for name, value in fields.items() if value is not None}
        _log.warning("disaggregation_failed", cause=split.value, backend=backend, **known)
