"""Values that are wrong only beside each other, and the names of bands, on which most of them turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from pydantic_core import PydanticCustomError

from llmproxy.config.value_types import integer_of, nearest
from llmproxy.core.domain import BAND_NAMES, CRITICAL, DEFAULT, SHEDDABLE

CEILINGS: Mapping[int, float] = {CRITICAL: 1.0, DEFAULT: 0.95, SHEDDABLE: 0.85}

Finding = tuple[tuple[str | int, ...], str]
"""A place below the validated field, and what is wrong there."""


def report(findings: Sequence[Finding]) -> None:
    """Raise all of them as one error, whose context still names every place."""
    if findings:
        told = "; ".join(f"{'.'.join(map(str, place))}: {reason}" for place, reason in findings)
        raise PydanticCustomError("findings", "{told}", {"told": told, "findings": list(findings)})


def repeated(texts: Sequence[str], key: str) -> list[Finding]:
    return [((i, key), f"{text!r} is given twice") for i, text in enumerate(texts) if text in texts[:i]]


def band_of(criticality: str | int, bands: Mapping[str, int]) -> int:
    """The band that a name or integer means, `bands` being the further names. Raises ValueError for an unknown name."""
    if isinstance(criticality, int):
        return criticality
    known = {**BAND_NAMES, **bands}
    if criticality.lower() not in known:
        raise ValueError(
            f"{criticality!r} is no band; known: {', '.join(known)}, or any integer"
            f' (nearest: "{nearest(criticality, tuple(known))}")'
        )
    return known[criticality.lower()]


def unknown_bands(
    named: Iterable[tuple[tuple[str | int, ...], str | int | None]], bands: Mapping[str, int]
) -> list[Finding]:
    """What is no band among (place, criticality)."""
    findings: list[Finding] = []
    for place, criticality in named:
        try:
            band_of(DEFAULT if criticality is None else criticality, bands)
        except ValueError as error:
            findings.append((place, str(error)))
    return findings


def bands_in(section: Mapping[str, float], key: str, bands: Mapping[str, int]) -> tuple[dict[int, str], list[Finding]]:
    """The bands that a mapping by band speaks of, each with the text it is given by, and what is wrong with others."""
    findings: list[Finding] = []
    given: dict[int, str] = {}
    for name in section:
        number = integer_of(name)
        try:
            band = band_of(name if number is None else number, bands)
        except ValueError as error:
            findings.append(((key, name), str(error)))
            continue
        if band in given:
            findings.append(((key, name), f"is the same band as {given[band]!r}"))
        given[band] = name
    return given, findings


def rising_ceilings(ceilings: Mapping[str, float], given: Mapping[int, str]) -> list[Finding]:
    """Where a lower band would be served above a higher one; `given` are the bands of `ceilings` by what names them."""
    values = {**CEILINGS, **{band: ceilings[name] for band, name in given.items()}}
    findings: list[Finding] = []
    for upper, lower in pairwise(sorted(values, reverse=True)):
        if values[lower] > values[upper]:
            reason = (
                f"band {lower} would wait at {values[lower]:g}, above band {upper} at {values[upper]:g}:"
                " ceilings must not rise as priority falls"
            )
            findings.append((("ceilings", given.get(lower) or given[upper]), reason))
    return findings
