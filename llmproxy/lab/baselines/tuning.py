"""Baselines by name, with other parameters than their documented ones for a tuning grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from inspect import signature
from itertools import product
from math import isfinite
from typing import cast

from llmproxy.lab.baselines.policy import Baseline, baselines

variants: Mapping[str, Mapping[str, Sequence[float]]] = {
    "epp_sticky": {"match": (0.5, 0.8), "penalty_s": (0.5, 2.0, 18.0)},
    "epp_blend": {"gate": (0.0, 1.0), "prefix": (1.0, 3.0, 6.0)},
    "dynamo_cost": {"overlap": (0.5, 1.0), "prefill_scale": (0.5, 1.0, 3.0)},
}
"""What is tried when the three strongest are tuned: every combination of these values, the other parameters as
documented."""


def variants_of(name: str) -> tuple[str, ...]:
    """The names of all variants in the grid of `name`, as `baseline_named` spells them. Raises KeyError without one."""
    grid = variants[name]
    combined = (dict(zip(grid, values, strict=True)) for values in product(*grid.values()))
    return tuple(baseline_named(_spelled(name, parameters)).name for parameters in combined)


def baseline_named(text: str) -> Baseline:
    """The baseline of a name like `epp_sticky` or `epp_sticky(match=0.5,penalty_s=2)`.

    Its own name is spelled in one way only: parameters in their documented order, without those that are as documented.
    Raises ValueError saying what is wrong, and the nearest known name.
    """
    name, opened, inside = text.strip().partition("(")
    name = name.rstrip()
    _check("baseline", name, baselines.names())
    factory = baselines.get(name)
    if not opened:
        return factory()
    if not inside.endswith(")"):
        raise ValueError(f"baseline {text!r}: a parameter list ends with a closing parenthesis")
    given = _parameters(text, inside[:-1])
    documented = {key: parameter.default for key, parameter in signature(factory).parameters.items()}
    for key in given:
        _check(f"parameter of {name}", key, tuple(documented))
    other = {key: given[key] for key in documented if key in given and given[key] != documented[key]}
    return replace(cast(Callable[..., Baseline], factory)(**other), name=_spelled(name, other))


def _parameters(text: str, inside: str) -> dict[str, float]:
    given: dict[str, float] = {}
    for part in inside.split(",") if inside.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value) if equals else -1.0
        except ValueError:
            number = -1.0
        if not (isfinite(number) and number >= 0):
            raise ValueError(
                f"baseline {text!r}: expected name=number with a number of 0 or more, found {part.strip()!r}"
            )
        if key in given:
            raise ValueError(f"baseline {text!r}: {key} is given twice")
        given[key] = number
    return given


def _check(kind: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        if not known:
            raise ValueError(f"unknown {kind}: {word!r}; it has none")
        nearest = get_close_matches(word, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown {kind}: {word!r} (nearest: {nearest!r}; known: {', '.join(known)})")


def _spelled(name: str, parameters: Mapping[str, float]) -> str:
    inside = ",".join(f"{key}={value:g}" for key, value in parameters.items())
    return f"{name}({inside})" if inside else name
