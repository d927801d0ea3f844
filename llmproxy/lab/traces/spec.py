"""Generators by name, as they are written on a command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from llmproxy.config.value_types import nearest
from llmproxy.lab.traces.arrival import Trace, TraceError
from llmproxy.lab.traces.contention import critical_and_flood, critical_bursts, unequal_tenants
from llmproxy.lab.traces.conversations import agent_loops, interactive_chat, multi_round_chat
from llmproxy.lab.traces.generators import (
    lora_zipf,
    mixed_objectives,
    noisy_neighbour,
    priority_mix,
    shared_system_prompts,
    shared_system_ramp,
    step_bursts,
)
from llmproxy.lab.traces.parts import check

PREFIX = "gen:"
GENERATORS: Mapping[str, Callable[..., Trace]] = {
    generator.__name__: generator
    for generator in (
        agent_loops,
        critical_and_flood,
        critical_bursts,
        interactive_chat,
        lora_zipf,
        multi_round_chat,
        noisy_neighbour,
        mixed_objectives,
        priority_mix,
        shared_system_prompts,
        shared_system_ramp,
        step_bursts,
        unequal_tenants,
    )
}
TRUTHS = {"true": True, "false": False}
KINDS = {int: "an integer", float: "a number", bool: "true or false"}


def generate(spec: str, seed: int = 0) -> Trace:
    """The trace of `gen:NAME,key=value,key=value`: keys are the generator's parameters, a `seed` there goes before the
    argument. Raises TraceError naming what is nearest to an unknown name or key.
    """
    name, *pairs = (part.strip() for part in spec.removeprefix(PREFIX).split(","))
    if name not in GENERATORS:
        known = ", ".join(GENERATORS)
        raise TraceError(f'no generator {name!r} (nearest: "{nearest(name, tuple(GENERATORS))}"); known: {known}')
    generator = GENERATORS[name]
    hints, parameters = get_type_hints(generator, include_extras=True), inspect.signature(generator).parameters
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals:
            raise TraceError(f"{PREFIX}{name}: {pair!r} should be key=value")
        if key not in parameters:
            raise TraceError(f'{PREFIX}{name}: no key {key!r} (nearest: "{nearest(key, tuple(parameters))}")')
        if key in given:
            raise TraceError(f"{PREFIX}{name}: {key} is given twice")
        given[key] = _value(hints[key], f"{PREFIX}{name}: {key}", text)
    try:
        for key, parameter in parameters.items():
            for low, high in getattr(hints[key], "__metadata__", ()):
                check(low, high, **{key: given.get(key, parameter.default)})
        trace = generator(**{"seed": seed, **given})
    except TraceError as error:
        raise TraceError(f"{PREFIX}{name}: {error}") from None
    return replace(trace, name=",".join([name, *pairs]))


def _value(hint: Any, key: str, text: str) -> Any:
    kind = getattr(hint, "__origin__", hint)
    try:
        return TRUTHS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise TraceError(f"{key} is {text!r}; should be {KINDS[kind]}") from None
