"""The speed of the backends of a pool, learned while the proxy runs from its own requests."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from llmproxy.core.estimates.learning import QuantileTracker, follow, gain
from llmproxy.core.estimates.line import JITTER_S, KEEP, OUTLIER, USUAL_TOKENS, LearnedLine
from llmproxy.core.estimates.whole_answers import WholeAnswers

RECENT_KEEP = 0.9  # Discount of earlier observations of one backend by each new one: about the last ten count.
# A backend counts as faster or slower than its pool if the difference exceeds two standard errors (4 if squared).
SURE = 4.0
FACTOR_MIN = 0.05
UNSEEN = 30.0
"""The evidence about a backend fades to a third after this many observations of other backends. The speed factor
changes only when less than one observation is left."""
STALE = 10  # Observations of the pool after which a speed factor is computed again.
FIRST_BYTES_OLD = 50  # Non-streamed answers since the first byte of any stream, after which they teach prompt times.
PROMPTS_MOST = 0.8  # Upper bound of the share of an answer's time spent on prompts; more is an error.
LOAD_GUESS_S = 0.05  # Assumed load time of an adapter before the first observation.
LOAD_GAIN = 0.1  # Least weight of the newest load time in the mean of its tier.
ATTENTION = 2e-5
"""Assumed attention: the time that one earlier token adds to a token, as a share of the token's own time. The sizes of
models and the speed of devices give 1e-5 (70B) to 6e-5 (8B)."""
ATTENTION_MAX = 1e-3
ATTENTION_KEEP = 0.998
"""Factor by which each observation of attention discounts the earlier ones: about the last five hundred count. The
model of a pool does not change, but one prompt says little."""
ATTENTION_WEIGHT = 10.0
"""Weight of the assumed attention, in observations of a prompt of `USUAL_TOKENS`. A prompt ten times as long weighs
about seventy times as much."""
TIERS = 8
"""Number of tiers of adapters. In tier k, the backend has loaded fewer than 2**k other adapters since it last used this
adapter. The last tier has all other adapters, also adapters that the backend never had."""


class Attention:
    """Learns `share`: the time that one earlier token adds to a prompt token, as a share of the token's own time.

    Each token passes through the weights once and attends to all earlier tokens. So n tokens after c cached tokens take
    time in proportion to n x (1 + share x (c + n / 2)). The share is fitted by least squares of relative errors over n
    and n x (c + n / 2), with a penalty for deviating from the assumed share (ridge regression).
    """

    def __init__(self, guess: float = ATTENTION) -> None:
        self.share = self._guess = guess
        self._sums: tuple[float, ...] = (0.0,) * 9

    def learn(self, line: LearnedLine, tokens: float, attended: float, took_s: float) -> None:
        """Learns from `took_s`, the time in which `tokens` were computed.

        `attended`: for each of the tokens, the number of earlier tokens that it attends to, added up over all of them.
        `line` gives the pool's prefill time. Its argument is `tokens + share * attended`.
        """
        expected_s = JITTER_S + line.at(tokens + self.share * attended)
        weight = expected_s**-2
        y = weight * min(took_s, OUTLIER * expected_s)
        x, z = weight * tokens, weight * attended
        newest = (weight, x, z, y, x * tokens, x * attended, z * attended, y * tokens, y * attended)
        sums = tuple([ATTENTION_KEEP * old + new for old, new in zip(self._sums, newest, strict=True)])
        self._sums = sums
        n, x, z, y, xx, xz, zz, xy, zy = sums
        # The base is fitted too: centering the sums about their means eliminates it from the normal equations.
        xx, xz, zz, xy, zy = xx - x * x / n, xz - x * z / n, zz - z * z / n, xy - x * y / n, zy - z * y / n
        usual_s = JITTER_S + line.at(USUAL_TOKENS)
        penalty = ATTENTION_WEIGHT * (0.5 * USUAL_TOKENS * USUAL_TOKENS / usual_s) ** 2
        xx, xz, zz = xx + penalty * self._guess * self._guess, xz - penalty * self._guess, zz + penalty
        per_token, per_attended = xy * zz - zy * xz, zy * xx - xy * xz
        if per_token > 0.0:
            self.share = min(ATTENTION_MAX, max(0.0, per_attended / per_token))


class _WeightedRatio:
    """The time of a backend divided by its pool's expected time, and its variance. Old observations fade."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._count = self._x = self._took = self._weights = 0.0
        self._squares = self._squared = 0.0
        self._seen = 0

    def learn(self, line: LearnedLine, x: float, took: float) -> None:
        before = line.base * self._count + line.slope * self._x
        # The error relative to the previous ratio. The first ratio is 1, so one observation proves nothing.
        error = took - (line.base + line.slope * x) * (self._took / before if before else 1.0)
        self._count = self._keep * self._count + 1.0
        self._x = self._keep * self._x + x
        self._took = self._keep * self._took + took
        self._weights = self._keep * self._keep * self._weights + 1.0
        # The first errors come from the assumed ratio and must be forgotten soon.
        self._squares = RECENT_KEEP * self._squares + error * error
        self._squared = RECENT_KEEP * self._squared + 1.0
        self._seen = line.seen

    def shrunk_to(self, middle: float, line: LearnedLine) -> float:
        """Returns the ratio, shrunk towards `middle`.

        The ratio is shrunk more if its standard error is larger (positive-part James-Stein) or its observations are
        older.
        """
        expected = line.base * self._count + line.slope * self._x
        over = self._took / expected - middle if expected > 0.0 else 0.0
        if not over:
            return middle
        variance = self._weights * self._squares / (self._squared * expected * expected)
        fresh = min(1.0, self._count * exp((self._seen - line.seen) / UNSEEN))
        return middle + over * fresh * max(0.0, 1.0 - SURE * variance / (over * over))


class SpeedFactor:
    """Learns `factor`: the time of one backend divided by the time of its pool for the same work.

    The factor is 1 until the observations of the backend differ from the pool's by more than chance.

    The last fifty observations give the long-term ratio. The ratio of the last ten replaces it if the two differ by
    more than chance. The long-term ratio is shrunk towards 1, and the recent ratio towards the long-term one, so that
    chance does not send the work to one of several equal backends. While the pool learns, its first backend defines the
    pool's speed. A backend that seems slow gets no work and cannot prove otherwise, so its evidence loses weight with
    the observations of the others.
    """

    def __init__(self) -> None:
        self._long, self._recent = _WeightedRatio(KEEP), _WeightedRatio(RECENT_KEEP)
        self.stale_at = 0
        self.factor = 1.0

    def learn(self, line: LearnedLine, x: float, took: float) -> None:
        """Learns that the backend took `took` for the work `x`. The expected time of its pool is `line.at(x)`."""
        self._long.learn(line, x, took)
        self._recent.learn(line, x, took)
        self.renew(line)

    def renew(self, line: LearnedLine) -> None:
        """Computes `factor` with the current line. Callers skip this until `line.seen` reaches `stale_at`."""
        self.stale_at = line.seen + STALE
        self.factor = max(FACTOR_MIN, self._recent.shrunk_to(self._long.shrunk_to(1.0, line), line))


class LoadTimesByTier:
    """Mean seconds to load an adapter, by tier (`TIERS`).

    An engine copies an adapter from host memory or reads it from disk, and publishes neither the source nor the time.
    A tier without observations uses the time of the next colder tier with observations, else of the coldest tier with
    observations.
    """

    def __init__(self) -> None:
        self._seen = [0] * TIERS
        self._took_s = [LOAD_GUESS_S] * TIERS
        self._expected_s = [LOAD_GUESS_S] * TIERS

    @property
    def seen(self) -> bool:
        """Whether at least one load was observed."""
        return any(self._seen)

    @property
    def coldest_s(self) -> float:
        """The expected load time of an adapter that the backend never loaded."""
        return self._expected_s[-1]

    def at(self, tier: int) -> float:
        """Returns the expected seconds to load an adapter of this tier (`TIERS`)."""
        return self._expected_s[tier]

    def learn(self, tier: int, took_s: float) -> None:
        seen = self._seen[tier] = self._seen[tier] + 1
        before_s = self._took_s[tier]
        if seen > 1:
            took_s = min(took_s, OUTLIER * (JITTER_S + before_s))
        self._took_s[tier] = follow(before_s, took_s, gain(LOAD_GAIN, seen))
        taught = [other for other in range(TIERS) if self._seen[other]]
        for other in range(TIERS):
            self._expected_s[other] = self._took_s[next((one for one in taught if one >= other), taught[-1])]


class PoolRates:
    """The learned times of a pool. A backend's time is the pool's time multiplied by the backend's `SpeedFactor`."""

    def __init__(self, attention: float = ATTENTION) -> None:
        self.attention = Attention(attention)
        # Uncached prompt tokens, weighted by `attention` -> seconds to compute them. The base is paid once for each
        # stretch of work that begins on an idle backend.
        self.prefill = LearnedLine(0.03, 1 / 15_000, USUAL_TOKENS, JITTER_S)
        # Running sequences -> seconds per output token, slowed by prompts (`step`) and without prompts (`decode`).
        self.step = LearnedLine(0.01, 1e-4, 64.0, 1e-3)
        self.decode = LearnedLine(0.01, 1e-4, 64.0, 1e-3)
        # Fetched prompt tokens -> seconds from the grant of a decode stage to its first byte.
        self.transfer = LearnedLine(0.03, 1e-5, USUAL_TOKENS, JITTER_S)
        self._assumed = self.prefill.base, self.prefill.slope, self.step.base, self.step.slope
        self._whole = WholeAnswers()
        self._whole_answers = FIRST_BYTES_OLD  # Non-streamed answers since the last first byte of a stream.
        self._usual_factor = 1.0  # Mean speed factor of the observed backends.
        self.loads = LoadTimesByTier()  # Extra seconds to load an adapter.
        # p90 factors by which the observed times exceed their predictions.
        self.late_ttft, self.late_tpot = QuantileTracker(), QuantileTracker()

    def work_s(
        self, requests: int, prompt_tokens: float, output_tokens: float, backends: Sequence[tuple[float, float, int]]
    ) -> float:
        """Returns the seconds that `backends` need together for this work, with uncached `prompt_tokens`.

        A single backend would compute all prompts one after the other, then the answers in full batches. Several
        backends share the work so that all end at the same time. Each of `backends` is (`prefill` factor, `step`
        factor, batch limit).
        """
        if not requests:
            return 0.0
        attended = prompt_tokens * 0.5 * prompt_tokens / requests
        prefill_s = (prompt_tokens + self.attention.share * attended) * self.prefill.slope
        alone_s = (
            prefill_s * prefill + output_tokens * self.decode.at(limit) * decode / limit
            for prefill, decode, limit in backends
        )
        return 1.0 / sum(1.0 / max(one_s, 1e-9) for one_s in alone_s)

    def prefilled(self, speed: SpeedFactor, tokens: float, attended: float, took_s: float) -> None:
        """Learns that `tokens`, which attended to `attended` earlier tokens in sum, were computed in `took_s`."""
        self._whole_answers = 0
        # Slow backends may get other prompt lengths than fast ones, which would tilt the line without the correction.
        self._usual_factor = follow(self._usual_factor, speed.factor, 1.0 - KEEP)
        usual_s = took_s * self._usual_factor / speed.factor
        self.attention.learn(self.prefill, tokens, attended, usual_s)
        tokens += self.attention.share * attended
        self.prefill.learn(tokens, usual_s)
        speed.learn(self.prefill, tokens, took_s)

    def loaded(self, speed: SpeedFactor, tiers: Sequence[int], tokens: float, took_s: float) -> None:
        """Learns load times of adapters.

        A backend with the speed factor `speed` computed prompts of `tokens` (weighted) and loaded one adapter of each
        of `tiers`, in `took_s` seconds together.
        """
        loads_s = max(0.0, took_s - self.prefill.at(tokens) * speed.factor)
        expected_s = [self.loads.at(tier) for tier in tiers]
        each = loads_s / sum(expected_s) if sum(expected_s) > 0.0 else 0.0
        for tier, one_s in zip(tiers, expected_s, strict=True):
            self.loads.learn(tier, one_s * each)

    def streamed(self, speed: SpeedFactor, running: float, per_token_s: float, decode_s: float) -> None:
        """Learns a stream's time per token after the first, with about `running` sequences in the batch.

        `decode_s` is `per_token_s` without the time of prompts that the backend computed meanwhile.
        """
        self.decode.learn(running, decode_s / speed.factor)
        self.step.learn(running, per_token_s)
        speed.learn(self.step, running, per_token_s)

    def answered(
        self,
        prefill: SpeedFactor,
        step: SpeedFactor,
        tokens: float,
        steps: float,
        running: float,
        took_s: float,
        others_s: float,
    ) -> None:
        """Learns from a non-streamed answer of `steps` tokens that ended `took_s` after it entered the engine's batch.

        The time is split in proportion to the expected times of prompt and tokens, so both speed factors learn the same
        ratio. The base time of a prompt cannot be separated here, and is assumed until streams show it. `tokens`: the
        weighted tokens of its prompt and of the prompts computed before it. Later prompts took `others_s`.
        """
        prompt_s, token_s = self.prefill.at(tokens), self.step.at(running)
        own_prompt_s, own_steps_s = prompt_s * prefill.factor, token_s * step.factor * steps
        slower = (own_prompt_s + own_steps_s) / (prompt_s + token_s * steps)
        self._usual_factor = follow(self._usual_factor, slower, 1.0 - KEEP)
        self._whole_answers += 1
        if self._whole_answers > FIRST_BYTES_OLD:
            base_s, slope_s, step_s, sequence_s = self._assumed
            usual_s = took_s * self._usual_factor / slower
            whole = self._whole
            whole.learn(slope_s * tokens, steps * (step_s + sequence_s * running), max(0.0, usual_s - base_s))
            prompt_s = base_s + whole.prompt * slope_s * tokens
            self.prefill.learn(tokens, prompt_s)
            own_prompt_s = prompt_s * slower / self._usual_factor
        ratio = took_s / (own_prompt_s + own_steps_s)
        prefill.learn(self.prefill, tokens, ratio * own_prompt_s)
        rest_s = took_s - own_prompt_s
        if rest_s < (1.0 - PROMPTS_MOST) * took_s:
            # The time is almost all prompt, and says too little about the tokens.
            return
        self.decode.learn(running, (rest_s - min(others_s, PROMPTS_MOST * rest_s)) / steps / step.factor)
        self.step.learn(running, rest_s / steps)
        step.learn(self.step, running, ratio * own_steps_s / steps)
