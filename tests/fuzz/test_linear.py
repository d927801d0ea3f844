"""Every parser and pattern takes time in proportion to the length of its text: processor time is measured.

The patterns are all that the package has, each with texts made from its own parse; the parsers are those that
`benchmarks/parts/linear.py` lists. That measures them up to the largest text that the product lets in, this to 32 KiB.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from benchmarks.parts.linear import Parser, growth_of_parser, parsers
from benchmarks.parts.patterns import Found, found_patterns, slowest

PARSED_BYTES = 32 << 10
PARTS = 7
MEASUREMENTS_MAX = 5
PARSERS = list(parsers())


def is_linear(subject: Parser | Found) -> bool:
    """Returns whether one of several measurements is linear, because a shared machine disturbs some.

    Code that is not linear fails each measurement.
    """
    if isinstance(subject, Found):
        return any(slowest(subject)[1] for _ in range(MEASUREMENTS_MAX))
    return any(growth_of_parser(subject, min(subject.largest, PARSED_BYTES)).linear for _ in range(MEASUREMENTS_MAX))


@cache
def patterns() -> list[Found]:
    return found_patterns()


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pattern_takes_linear_time(part: int) -> None:
    for found in patterns()[part::PARTS]:
        assert is_linear(found), (
            f"{found.where}: {found.pattern.pattern!r} is slow for texts like {slowest(found)[0](24)!r}"
        )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])
def test_every_parser_takes_linear_time(parser: Parser) -> None:
    assert is_linear(parser)


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        # What headers with a time were read by until one of 2,000 digits held the process for half a minute.
        (r"(\d+\.?\d*|\.\d+)(ns|us|ms|s|m|h)", "finditer"),
        (r"\s*(\d+\.?\d*|\.\d+)\s*", "fullmatch"),
        (r"(\w+\d*)*!", "match"),
        (r"(?:ab?)*(?:ab)*$", "match"),
        (r"x\s*,?\s*y", "search"),
        (r"\s+$", "search"),
    ],
)
def test_a_pattern_that_is_not_linear_is_found(pattern: str, method: str) -> None:
    assert not is_linear(Found("here", re.compile(pattern), (method,)))


def test_a_parser_that_is_not_linear_is_found() -> None:
    def read(text: bytes) -> None:
        for at in range(0, len(text), 64):
            text.find(b"xy", 0, at)

    assert not is_linear(Parser("here", PARSED_BYTES * 3, lambda size: b"x" * size * 3, read))
