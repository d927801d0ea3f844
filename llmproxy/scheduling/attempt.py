"""An attempt to serve a request on one backend: its grant, its state and its result."""

from __future__ import annotations

import json
from enum import IntEnum, StrEnum

from msgspec import Struct

from llmproxy.core.domain import Grant, GrantReason, Outcome, Predicted, Stage, Verdict
from llmproxy.core.retry import MEANINGS, Again, Cause

ERROR_CHARS_MAX = 2_000  # Maximum length of an error as JSON. A pipe may mix log lines of more than 4 KB.
_BEGINNING_CHARS = 160


class Split(StrEnum):
    """How a request was served in a pool with roles: SPLIT, WHOLE, or the last reason why a split failed."""

    SPLIT = "split"  # Prefill and decode on two backends.
    WHOLE = "whole"  # A single backend, because that was cheaper or the only possibility.
    PREFILL_FAILED = "prefill_failed"
    PREFILL_REFUSED = "prefill_refused"
    NO_PARAMETERS = "no_parameters"
    BAD_PARAMETERS = "bad_parameters"
    LATE = "late_parameters"
    UNREACHABLE = "unreachable"
    TRANSFER_FAILED = "transfer_failed"
    DECODE_FAILED = "decode_failed"
    DECODE_REFUSED = "decode_refused"


class AttemptState(IntEnum):
    """The progress of an attempt. The state only grows, except as `Attempt.enter` and `Attempt.restart` say."""

    CONNECTING = 0
    HEAD = 1  # The backend has sent the head of an answer.
    HELD = 2  # Bytes of the body are held back: the first event of a stream, an error, or the result of a prefill.
    STREAMING = 3  # The client gets the answer. Another attempt can only generate the rest.
    DELIVERING = 4  # The whole answer is written, and the client still has to read the rest.
    DONE = 5
    FAILED = 6


class Attempt(Struct, kw_only=True, omit_defaults=True):
    """An attempt, from its grant to its end. It is part of the record of its request, and nothing changes it after its
    end.

    Times are on the scheduler's clock, so that their order can be audited. The fields up to `predicted_tpot` come from
    the grant and never change.
    """

    backend: str | None = None
    stage: Stage = Stage.WHOLE
    # The attempt waited from `queued_s` to `granted_s`. At its grant, `queued_ahead` requests of its pool still waited.
    queued_s: float | None = None
    granted_s: float | None = None
    queued_ahead: int | None = None
    why: GrantReason | None = None  # Why this request was granted a backend before others.
    candidates: int | None = None  # Number of backends that the placement compared.
    terms: tuple[tuple[str, float], ...] = ()  # The named parts of the chosen backend's score.
    # Predictions of the placement, None if it predicts nothing. The time to first token starts at the grant.
    expected_cached_tokens: int | None = None
    predicted_ttft: Predicted | None = None
    predicted_tpot: Predicted | None = None
    span_id: str | None = None  # The span that was sent to the backend as the parent, None without tracing.

    state: AttemptState = AttemptState.CONNECTING
    committed: bool = False  # Whether the attempt has been in STREAMING: the answer to the client has begun.
    first_byte_s: float | None = None  # When the first token of a stream was passed to the client.
    chunks: int = 0
    max_gap_s: float | None = None  # The longest wait between two chunks of a stream, in seconds.
    ended_s: float | None = None  # When the attempt ended or was preempted.

    outcome: Outcome = Outcome.INTERNAL
    verdict: Verdict = Verdict.CLIENT_GONE
    again: Again = Again.NO  # Whether another backend may be tried; NO or REST once the client has received a byte.
    deadly: bool = False  # Whether the request may have crashed the engine.
    planned: bool = False  # Whether the backend ended on purpose.
    prefilled: bool = False  # Whether a prefill stage succeeded, so that the decode stage follows on another backend.
    unsplit: bool = False  # Whether the request should be retried without a split.
    split: Split | None = None  # Why a stage of a split request failed.
    status: int | None = None  # HTTP status of the backend's response, None without a response.
    message: str = ""  # The error message for the client.
    detail: str = ""  # More about the error, for the operator only, because it may contain addresses.
    prompt_tokens: int | None = None  # Token counts that the engine reported; None if it reported no usage.
    cached_tokens: int | None = None
    output_tokens: int | None = None
    # Tokens that are charged in addition to the reported ones, because the engine reported none or not all.
    estimated_prompt_tokens: int = 0
    estimated_output_tokens: int = 0
    cost: float = 0.0  # Price of the tokens on an external backend, in the currency of the configuration.

    @classmethod
    def begun(cls, grant: Grant, queued_s: float) -> Attempt:
        """Returns the attempt of a request that was granted a backend after waiting since `queued_s`."""
        placed, request = grant.placed, grant.request
        return cls(
            backend=placed.backend,
            stage=request.stage,
            queued_s=queued_s,
            granted_s=grant.at_s,
            queued_ahead=grant.queued_ahead,
            why=grant.why,
            candidates=placed.candidates,
            terms=placed.terms,
            expected_cached_tokens=placed.cached_tokens if request.prefix or placed.ttft is not None else None,
            predicted_ttft=placed.ttft,
            # Several sequences stream interleaved, so the time per token of a single sequence cannot be observed.
            predicted_tpot=placed.tpot if request.sequences <= 1 else None,
        )

    def __repr__(self) -> str:
        return (
            f"<Attempt {self.state.name} outcome={self.outcome} verdict={self.verdict} status={self.status}"
            f" chunks={self.chunks} again={self.again.name}>"
        )

    def enter(self, state: AttemptState) -> None:
        """Changes the state. Raises ValueError for the same or a smaller state, and for any step after DONE.

        A failed attempt may enter DELIVERING, because the client gets the error event that ended its stream, and may
        fail again meanwhile.
        """
        was = self.state
        if was is AttemptState.DONE or (
            state <= was and (was is not AttemptState.FAILED or state < AttemptState.DELIVERING)
        ):
            raise ValueError(f"an attempt cannot go from {was.name} to {state.name}")
        self.state = state
        if state is AttemptState.STREAMING:
            self.committed = True

    def fail(self, outcome: Outcome, cause: Cause, message: str) -> None:
        """Records a failure. `cause` decides the verdict and whether the request or its rest may be retried."""
        meaning = MEANINGS[cause]
        self.enter(AttemptState.FAILED)
        self.outcome, self.verdict, self.message = outcome, meaning.verdict, message
        self.again = meaning.again
        if self.committed:
            self.again = Again.REST if meaning.rest else Again.NO
        self.deadly, self.planned = meaning.deadly, meaning.planned

    def complete(self) -> None:
        """Records that the answer is complete. The client may not have got all of it yet."""
        self.outcome, self.verdict = Outcome.COMPLETED, Verdict.SERVED

    def restart(self) -> None:
        """Forgets a refusal of the backend, because the same backend gets another call."""
        self.state, self.outcome, self.verdict = AttemptState.CONNECTING, Outcome.INTERNAL, Verdict.CLIENT_GONE
        self.again, self.unsplit, self.status, self.message, self.detail = Again.NO, False, None, "", ""

    @property
    def error(self) -> str | None:
        """Message and detail of the failure, shortened for a log line; None if there is neither."""
        return shortened(f"{self.message} {self.detail}".strip())

    @property
    def predicted(self) -> dict[str, float]:
        """The predictions of the placement by name. Missing predictions are left out."""
        ttft, tpot = self.predicted_ttft, self.predicted_tpot
        predicted: dict[str, float] = (
            {} if self.expected_cached_tokens is None else {"cached_tokens": self.expected_cached_tokens}
        )
        if ttft is not None:
            predicted |= {"ttft_s": ttft.expected_s, "ttft_p90_s": ttft.p90_s}
        if tpot is not None:
            predicted |= {"tpot_s": tpot.expected_s, "tpot_p90_s": tpot.p90_s}
        return predicted


def shortened(error: str) -> str | None:
    """Returns `error`, or only its beginning if it is longer than ERROR_CHARS_MAX as JSON; None if it is empty."""
    # The limit applies to JSON, where escapes turn one character into up to twelve.
    if len(error) > _BEGINNING_CHARS and len(json.dumps(error)) > ERROR_CHARS_MAX:
        return f"{error[:_BEGINNING_CHARS]}... ({len(error)} characters)"
    return error or None
