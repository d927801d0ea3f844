"""Validation helpers: checks across several values, and bands by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from llmproxy.config.document import Place
from llmproxy.config.value_types import integer_of, nearest
from llmproxy.core.domain import BAND_NAMES, DEFAULT

Problem = tuple[Place, str]  # A problem of the configuration: its place below the validated field, and its description.


def report(problems: Iterable[Problem]) -> None:
    """Raises all problems, if there are any, as one ValidationError, each with its place in the configuration."""
    errors = [
        InitErrorDetails(type="value_error", loc=place, input="", ctx={"error": ValueError(reason)})
        for place, reason in problems
    ]
    if errors:
        raise ValidationError.from_exception_data("configuration", errors)


def repeated(texts: Sequence[str], key: str) -> list[Problem]:
    """Returns a problem for each duplicate of an earlier text. Its location is (index of the duplicate, `key`)."""
    return [((i, key), f"{text!r} is given twice") for i, text in enumerate(texts) if text in texts[:i]]


def band_of(criticality: str | int, bands: Mapping[str, int]) -> int:
    """Returns the band for a name or an integer. `bands`: configured name -> band. Raises ValueError if unknown."""
    if isinstance(criticality, int):
        return criticality
    known = {**BAND_NAMES, **bands}
    if criticality.lower() not in known:
        raise ValueError(
            f"{criticality!r} is no band; known: {', '.join(known)}, or any integer"
            f' (nearest: "{nearest(criticality, tuple(known))}")'
        )
    return known[criticality.lower()]


def unknown_bands(entries: Iterable[object], key: str, bands: Mapping[str, int]) -> list[Problem]:
    """Returns a problem for each entry whose `key` names no band."""
    problems: list[Problem] = []
    for i, entry in enumerate(entries):
        try:
            band_of(DEFAULT if (criticality := getattr(entry, key)) is None else criticality, bands)
        except ValueError as error:
            problems.append(((i, key), str(error)))
    return problems


def bands_in(section: Mapping[str, float], key: str, bands: Mapping[str, int]) -> tuple[dict[int, str], list[Problem]]:
    """Returns band -> its name in `section`, and a problem for each name there that is no band or repeats a band."""
    problems: list[Problem] = []
    given: dict[int, str] = {}
    for name in section:
        number = integer_of(name)
        try:
            band = band_of(name if number is None else number, bands)
        except ValueError as error:
            problems.append(((key, name), str(error)))
            continue
        if band in given:
            problems.append(((key, name), f"is the same band as {given[band]!r}"))
        given[band] = name
    return given, problems


def rising_ceilings(values: Mapping[int, float], given: Mapping[int, str]) -> list[Problem]:
    """Returns a problem for each band with a higher ceiling than a higher band. `given`: band -> name for messages."""
    problems: list[Problem] = []
    for upper, lower in pairwise(sorted(values, reverse=True)):
        if values[lower] > values[upper]:
            reason = (
                f"band {lower} would wait at {values[lower]:g}, above band {upper} at {values[upper]:g}:"
                " ceilings must not rise as priority falls"
            )
            problems.append((("ceilings", given.get(lower) or given[upper]), reason))
    return problems
