"""Finds baselines by their names on the command line, with parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from math import isfinite
from typing import cast

from llmproxy.config.value_types import nearest
from llmproxy.lab.baselines.policy import Baseline, baselines


def split_policy(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Splits a policy like `blend(look_ahead=0,fairness=fcfs)` into its name and parameters. Raises ValueError."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return name, []
    pairs = [pair.partition("=") for pair in rest.removesuffix(")").split(",")]
    if not rest.endswith(")") or not all(equals for _, equals, _ in pairs):
        raise ValueError(f"policy {text!r}: parameters are written like blend(look_ahead=0,fairness=fcfs)")
    return name, [(key.strip(), value.strip()) for key, _, value in pairs]


def baseline_named(text: str) -> Baseline:
    """Returns the baseline for a text like `epp_sticky` or `epp_sticky(match=0.5,penalty_s=2)`.

    The baseline's name has its parameters in their documented order, without defaults. Raises ValueError with the
    reason and the nearest known name.
    """
    name, pairs = split_policy(text)
    factory, given = baselines.get(name), _numbers(text, pairs)
    documented = {key: parameter.default for key, parameter in signature(factory).parameters.items()}
    for key in given:
        if not documented:
            raise ValueError(f"unknown parameter of {name}: {key!r}; it has none")
        if key not in documented:
            known = ", ".join(documented)
            near = nearest(key, tuple(documented))
            raise ValueError(f"unknown parameter of {name}: {key!r} (nearest: {near!r}; known: {known})")
    other = {key: given[key] for key in documented if key in given and given[key] != documented[key]}
    return replace(cast(Callable[..., Baseline], factory)(**other), name=_spelled(name, other))


def _numbers(text: str, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    given: dict[str, float] = {}
    for key, value in pairs:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not (isfinite(number) and number >= 0):
            found = f"{key}={value}"
            raise ValueError(f"baseline {text!r}: expected name=number with a number of 0 or more, found {found!r}")
        if key in given:
            raise ValueError(f"baseline {text!r}: {key} is given twice")
        given[key] = number
    return given


def _spelled(name: str, parameters: Mapping[str, float]) -> str:
    inside = ",".join(f"{key}={value:g}" for key, value in parameters.items())
    return f"{name}({inside})" if inside else name
