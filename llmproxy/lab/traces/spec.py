"""Generators by name, as on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, get_type_hints

from llmproxy.config.value_types import nearest
from llmproxy.lab.traces import contention, conversations, generators
from llmproxy.lab.traces.arrival import Arrival, Trace, TraceError
from llmproxy.lab.traces.formats import MOONCAKE_BLOCK_TOKENS
from llmproxy.lab.traces.parts import check

PREFIX = "gen:"
GENERATORS: Mapping[str, Callable[..., Iterator[Arrival]]] = {
    generator.__name__: generator
    for generator in (
        conversations.agent_loops,
        contention.critical_and_flood,
        contention.critical_bursts,
        conversations.interactive_chat,
        generators.lora_zipf,
        generators.noisy_neighbour,
        generators.mixed_lengths,
        generators.mixed_objectives,
        generators.priority_mix,
        generators.shared_system_prompts,
        generators.step_bursts,
        generators.rate_ramp,
        generators.day,
        contention.unequal_tenants,
    )
}
KINDS = {int: "an integer", float: "a number"}


def generate(spec: str, seed: int = 0) -> Trace:
    """Returns the trace of `gen:NAME,key=value,...`. Keys are parameters of the generator; a key `seed` replaces
    `seed`.

    Raises TraceError, which names the nearest known name for an unknown name or key.
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
    arguments = {key: parameter.default for key, parameter in parameters.items()} | {"seed": seed} | given
    arrivals = partial(generator, **arguments)
    try:
        for key, value in arguments.items():
            for low, high in getattr(hints[key], "__metadata__", ()):
                check(low, high, **{key: value})
        # The generator itself reports parameters that do not fit together, before its first arrival.
        next(arrivals(), None)
    except TraceError as error:
        raise TraceError(f"{PREFIX}{name}: {error}") from None
    return Trace(",".join([name, *pairs]), arrivals, arguments.get("block_tokens", MOONCAKE_BLOCK_TOKENS))


def _value(hint: Any, key: str, text: str) -> Any:
    kind = getattr(hint, "__origin__", hint)
    try:
        return kind(text)
    except ValueError:
        raise TraceError(f"{key} is {text!r}; should be {KINDS[kind]}") from None
