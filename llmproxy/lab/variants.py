"""Variants of a fleet for one trace: several sizes or autoscaling signals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llmproxy.lab.fleet.fleet_file import REPLICAS_MAX
from llmproxy.lab.fleet.spec import Autoscale, SimulatedFleet
from llmproxy.lab.run.runs import Finished
from llmproxy.lab.scaling.signals import SIGNALS

SIZES_MAX = 64


def fleets(fleet: SimulatedFleet, scales: Sequence[str], sizes: str | None) -> dict[str, SimulatedFleet]:
    """Maps a suffix for the names of policies to each variant of `fleet` that the options of `llmproxy simulate` ask
    for.

    Without such options, the only key is "". Raises ValueError with the reason for options that do not fit together.
    """
    if sizes is not None:
        if scales or fleet.autoscale is not None:
            raise ValueError("--fleet-size: a fleet of given sizes does not scale; leave out --scale and autoscale")
        if fleet.faults:
            raise ValueError("--fleet-size: the faults of the fleet's file name replicas that may not be there")
        counts = _counts(sizes)
        return {f"{count} replicas" if count > 1 else "1 replica": resized(fleet, count) for count in counts}
    for signal in scales:
        if signal not in SIGNALS:
            raise ValueError(f"--scale {signal}: is no signal (known: {', '.join(SIGNALS)})")
    if len(scales) == 1:
        return {"": replace(fleet, autoscale=_following(fleet, scales[0]))}
    return {name: replace(fleet, autoscale=_following(fleet, name)) for name in dict.fromkeys(scales)} or {"": fleet}


def resized(fleet: SimulatedFleet, count: int) -> SimulatedFleet:
    """Returns a fleet of `count` replicas: the first ones of `fleet`, repeated if it has fewer."""
    kinds = fleet.replicas
    width = len(str(count - 1))
    chosen = (replace(kinds[i % len(kinds)], name=f"gpu-{i:0{width}}") for i in range(count))
    return replace(fleet, name=f"{count} of {fleet.name}", replicas=tuple(chosen))


def labelled(found: Mapping[str, Sequence[Finished]]) -> Iterator[Finished]:
    """Yields all runs, with the variant in the name of the policy."""
    for label, finished in found.items():
        for one in finished:
            name = f"{one.run.policy}, {label}" if label else one.run.policy
            yield Finished(one.run.model_copy(update={"policy": name}), one.trail)


def _following(fleet: SimulatedFleet, signal: str) -> Autoscale:
    return replace(fleet.autoscale or Autoscale(signal), policy=signal)


def _counts(text: str) -> list[int]:
    span = re.fullmatch(r"\s*([0-9]{1,6})\s*\.\.\s*([0-9]{1,6})\s*", text)
    if span is not None:
        counts = list(range(int(span[1]), int(span[2]) + 1))
    elif re.fullmatch(r"\s*[0-9]{1,6}(\s*,\s*[0-9]{1,6})*\s*", text):
        counts = sorted({int(part) for part in text.split(",")})
    else:
        raise ValueError(f"--fleet-size {text}: write it like 2..12, or like 2,4,8")
    if not counts or counts[0] < 1 or counts[-1] > REPLICAS_MAX or len(counts) > SIZES_MAX:
        raise ValueError(f"--fleet-size {text}: should be 1 to {SIZES_MAX} sizes of 1 to {REPLICAS_MAX} replicas")
    return counts
