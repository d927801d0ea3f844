"""Counts the results of a batch, and formats its progress and its summary."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from llmproxy.tools.batch.results import Result

RATE_OVER_S = 60.0  # The rate of the progress is the mean over this many seconds.


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Tally:
    """The counts of a batch, including the results of earlier runs."""

    total: int
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    trouble: str = ""
    """Why an attempt failed last; "" if none did."""
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def count(self, result: Result) -> None:
        """Counts a result and the tokens in its `usage`."""
        self.done += 1
        self.failed += result.failed
        if result.response is not None:
            with suppress(msgspec.MsgspecError, RecursionError):  # Not every answer has usage.
                if usage := _ANSWER.decode(result.response.body).usage:
                    self.prompt_tokens += usage.prompt_tokens + usage.input_tokens
                    self.answer_tokens += usage.completion_tokens + usage.output_tokens

    def progress(self, now: float, in_flight: int) -> str:
        """Returns the counts, the rate and the time left as text.

        `in_flight` is the number of open requests. Must be called regularly, because the rate is computed from the
        calls of the last RATE_OVER_S.
        """
        self._samples.append((now, self.done))
        while now - self._samples[0][0] > RATE_OVER_S:
            self._samples.popleft()
        first_s, first = self._samples[0]
        rate = (self.done - first) / (now - first_s) if now > first_s else 0.0
        left = _duration((self.total - self.done) / rate) if rate else "unknown"
        parts = [f"{self.done:,}/{self.total:,}", f"{self.failed:,} failed", f"{in_flight} in flight"]
        parts += [f"{rate:,.1f}/s", f"{left} left", *filter(None, [self.trouble])]
        return ", ".join(parts)

    def summary(self, seconds: float) -> str:
        """Returns the counts as a sentence. `seconds` is how long this run took."""
        missing = self.total - self.done
        return (
            f"{self.done:,} of {self.total:,} requests have a result, {self.failed:,} of them failed"
            + (f"; {missing:,} are left" if missing else "")
            + f". {self.prompt_tokens:,} prompt tokens, {self.answer_tokens:,} answer tokens, {_duration(seconds)}."
        )


def _duration(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} days"
