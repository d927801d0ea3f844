"""The two stages of a split request: what the first one hands over, what the second one waits for, and how they fail.

Nothing is promised to the client before the second one has brought a token, and a stage that fails costs time alone:
the request is served as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from urllib.parse import urlsplit

import structlog

from llmproxy.core.domain import Grant, Outcome, Stage, Usage, Verdict
from llmproxy.core.kv_connectors import NotHandedOver, Parameters
from llmproxy.core.retry import Again, Cause
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying.attempt import Attempt
from llmproxy.observe.exit import Split
from llmproxy.scheduling.lease import Lease

OPENING_EVENTS: Mapping[BodyKind, int] = {BodyKind.CHAT: 1, BodyKind.RESPONSES: 2, BodyKind.MESSAGES: 1}
"""Events of a stream that say only that it begins. An engine sends them before it knows whether the KV-cache of the
prompt can be had."""
WARNINGS_MAX = 1_000
"""Backends and causes of which a warning is remembered, so that it is written once."""
PREFILL_LIMIT_S, PREFILL_LATE = 30.0, 5.0
"""A prompt that took so long, and so many times what is exceeded in one case of ten, is not waited for any more. Only
streams show whether a backend hangs, and one that computes prompts alone has none."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HINTS = {
    Split.NO_PARAMETERS: "start it with --kv-transfer-config, or give it the role both",
    Split.BAD_PARAMETERS: "all backends of a pool should run the same version of the engine and of its KV connector",
    Split.LATE: "the other backends had no room for so long; if engines keep prompts longer, raise kv_lease_s",
    Split.UNREACHABLE: "set VLLM_NIXL_SIDE_CHANNEL_HOST of that engine to an address that other machines reach",
    Split.TRANSFER_FAILED: "see the log of that engine, and whether it reaches the side channel of the other one",
}

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Handover:
    """The prompt was computed on `backend`, whose base URL is `url`, and its answer came at `at_s`.

    `answers_on` is the backend that was to keep a place for the answer.
    """

    backend: str
    url: str
    parameters: Parameters
    at_s: float
    answers_on: str | None = None

    def too_late(self, now: float) -> bool:
        """Whether the blocks may be gone before they are read."""
        return self.parameters.age_max_s is not None and now - self.at_s > self.parameters.age_max_s

    def unreachable_from(self, url: str) -> bool:
        """Whether the engine at `url` would look for the other one on its own machine, where it is not."""
        first, second = urlsplit(self.url).hostname, urlsplit(url).hostname
        same = first == second or {first, second} <= _LOOPBACK
        return self.parameters.host in _LOOPBACK and not same


def prefill_limit_s(grant: Grant) -> float:
    """How long the prompt of a grant may take before the request goes elsewhere; inf where it has a whole answer."""
    if grant.request.stage is not Stage.PREFILL:
        return inf
    predicted = grant.placed.ttft
    return max(PREFILL_LIMIT_S, PREFILL_LATE * (0.0 if predicted is None else predicted.p90_s))


def fail_handover(attempt: Attempt, error: NotHandedOver) -> None:
    """A prompt was computed, and nothing can come of it."""
    attempt.detail = error.message
    attempt.split = Split.NO_PARAMETERS if error.missing else Split.BAD_PARAMETERS
    message = "The backend did not say where what it computed is."
    attempt.fail(Outcome.UPSTREAM_STATUS, Cause.NOT_TRANSFERRED, message)
    attempt.status, attempt.unsplit = 502, True


def refuse_unreachable(attempt: Attempt, handover: Handover, lease: Lease) -> None:
    """End a second stage whose backend cannot find the first one, before it is asked."""
    attempt.split, attempt.unsplit, attempt.status = Split.UNREACHABLE, True, 502
    host = handover.parameters.host
    attempt.detail = f"{handover.backend} names {host} as its host, and {lease.backend} is on another machine"
    message = "The backend cannot fetch what another one computed."
    attempt.fail(Outcome.UPSTREAM_STATUS, Cause.NOT_TRANSFERRED, message)
    lease.verdict, lease.usage = attempt.verdict, Usage(0, 0)


def decide_stage_retry(attempt: Attempt, stage: Stage) -> None:
    """Say what is to become of a request of which one stage has ended, if that one failed before the first byte."""
    if attempt.committed or attempt.outcome in (Outcome.COMPLETED, Outcome.INTERNAL) or attempt.split is not None:
        return
    # The answer says that this engine does not take the request as it is, or cannot compute it: a whole may do better.
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
        # Nothing in the answer speaks of KV. Whichever of the two is to blame, a failure of this one is not proven.
        attempt.verdict, attempt.split, attempt.unsplit = Verdict.TRANSFER_FAILED, Split.TRANSFER_FAILED, True


class Warnings:
    """One warning for each cause and backend, of requests that were not split to their end."""

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
