"""The latency objectives of requests: time to first token and time per output token."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from llmproxy.core.domain import Outcome
from llmproxy.lab.fleet.spec import ReplicaSpec, SimulatedFleet
from llmproxy.lab.results.record import Record
from llmproxy.lab.simulator.engine.profiles import Profile
from llmproxy.lab.traces.arrival import Arrival

TTFT_LEAST_S = 1.0
TTFT_FACTOR = 3.0
TPOT_SMALL_S = 0.040
TPOT_LARGE_S = 0.075
SMALL = re.compile(r"(?:^|[^0-9a-z.])8b(?:$|[^0-9a-z])", re.IGNORECASE)  # Matches the name of a profile of an 8B model.
PROMPTS_KEPT = 65_536  # Size of the cache that maps a prompt length to its unloaded time.


def scaled_profile(spec: ReplicaSpec, prefill_scale: float) -> Profile:
    """Returns the replica's step times with `prefill_scale` times the prefill cost of its profile."""
    return replace(spec.profile, prefill_factor=prefill_scale)


def prefill_s(profile: Profile, step_tokens: int, first: int, end: int) -> float:
    """Returns the seconds that an idle engine takes for positions `first` to `end`, in chunks of `step_tokens`."""
    starts = range(first, end, step_tokens)
    return sum(profile.step_s(0, 0, [(start, min(start + step_tokens, end))]) for start in starts)


class Wanted(NamedTuple):
    """Objectives that replace the objectives of all requests, if given. A `share` of the requests should meet them."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = 0.95

    @classmethod
    def parsed(cls, text: str) -> Wanted:
        """Parses `ttft=1s,tpot=50ms,share=0.99`, each part optional. Raises ValueError with the reason."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in ("ttft", "tpot", "share"):
                raise ValueError(f"{part.strip()!r} is none of ttft=1s, tpot=50ms, share=0.95")
            number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s)?", value.strip())
            if number is None or float(number[1]) == 0.0 or (name == "share") != (number[2] is None):
                example = "a share from 0 to 1" if name == "share" else "a time above 0, such as 1s or 50ms"
                raise ValueError(f"{part.strip()!r} should have {example}")
            if name == "share" and float(number[1]) > 1.0:
                raise ValueError(f"{part.strip()!r} should have a share from 0 to 1")
            key = name if name == "share" else f"{name}_s"
            found[key] = float(number[1]) * (0.001 if number[2] == "ms" else 1.0)
        return cls(**found)

    def __str__(self) -> str:
        times = {"to the first token": self.ttft_s, "for each further token": self.tpot_s}
        named = [f"{value:g} s {name}" for name, value in times.items() if value is not None]
        return " and ".join(named) or "the objectives"


NOTHING_WANTED = Wanted()


class Objectives:
    """The objectives of a fleet.

    Time to first token: 1 s, or three times the time of the fastest idle replica with an empty cache, whichever is
    more. Mean time per output token: 40 ms if every replica has a profile of an 8B model, else 75 ms. An arrival's
    objectives replace these defaults, and `wanted` replaces both.
    """

    def __init__(self, fleet: SimulatedFleet, prefill_scale: float, wanted: Wanted = NOTHING_WANTED) -> None:
        self._wanted = wanted
        # Equal replicas have equal times.
        alike = dict.fromkeys((scaled_profile(spec, prefill_scale), spec.step_tokens) for spec in fleet.replicas)
        self._engines = tuple(alike)
        self._tpot_s = TPOT_SMALL_S if all(SMALL.search(r.profile_name) for r in fleet.replicas) else TPOT_LARGE_S
        self.unloaded_ttft_s = lru_cache(maxsize=PROMPTS_KEPT)(self._unloaded_ttft_s)

    def for_arrival(self, arrival: Arrival) -> tuple[float, float]:
        """Returns the objectives of `arrival`: (time to first token, mean time per output token), in seconds."""
        ttft_s = arrival.ttft_slo_s if self._wanted.ttft_s is None else self._wanted.ttft_s
        tpot_s = arrival.tpot_slo_s if self._wanted.tpot_s is None else self._wanted.tpot_s
        if ttft_s is None:
            ttft_s = max(TTFT_LEAST_S, TTFT_FACTOR * self.unloaded_ttft_s(arrival.prompt_tokens))
        return ttft_s, self._tpot_s if tpot_s is None else tpot_s

    def met(self, record: Record) -> bool:
        """Returns whether the answer was completed within both objectives.

        The first token of a whole answer is invisible, so it has the time of both objectives to its end.
        """
        if record.outcome is not Outcome.COMPLETED:
            return False
        ttft_slo_s, tpot_slo_s = self.for_arrival(record.arrival)
        if record.ttft_s is None:
            return record.ended_s - record.arrived_s <= ttft_slo_s + tpot_slo_s * (record.output_tokens - 1)
        return record.ttft_s <= ttft_slo_s and (record.tpot_s or 0.0) <= tpot_slo_s

    def _unloaded_ttft_s(self, prompt_tokens: int) -> float:
        """Returns the time to first token on the fastest idle replica with an empty cache."""
        return min(
            profile.frontend_s + prefill_s(profile, step_tokens, 0, prompt_tokens)
            for profile, step_tokens in self._engines
        )
