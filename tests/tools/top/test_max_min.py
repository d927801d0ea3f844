"""Shares by weight: nobody gets more than it wants, and the others share equally by weight."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.tools.top.whatif import Claim, max_min


@pytest.mark.parametrize(
    ("claims", "wanted"),
    [
        ({}, {}),
        ({"a": Claim(1.0, inf), "b": Claim(1.0, inf)}, {"a": 50.0, "b": 50.0}),
        ({"a": Claim(3.0, inf), "b": Claim(1.0, inf)}, {"a": 75.0, "b": 25.0}),
        ({"a": Claim(1.0, 10.0), "b": Claim(1.0, inf), "c": Claim(2.0, inf)}, {"a": 10.0, "b": 30.0, "c": 60.0}),
        ({"a": Claim(8.0, 30.0), "b": Claim(1.0, 20.0), "c": Claim(1.0, inf)}, {"a": 30.0, "b": 20.0, "c": 50.0}),
        ({"a": Claim(1.0, 90.0), "b": Claim(1.0, inf)}, {"a": 50.0, "b": 50.0}),
        ({"a": Claim(1.0, 20.0), "b": Claim(5.0, 30.0)}, {"a": 20.0, "b": 30.0}),
        ({"a": Claim(1e17, 40.0), "b": Claim(1.0, inf)}, {"a": 40.0, "b": 60.0}),
    ],
)
def test_shares_of_a_hundred(claims: dict[str, Claim], wanted: dict[str, float]) -> None:
    assert max_min(100.0, claims) == pytest.approx(wanted)


CLAIMS = st.builds(Claim, st.floats(1e-3, 1e3), st.one_of(st.just(inf), st.floats(0.0, 1e4)))


@given(st.floats(0.0, 1e4), st.dictionaries(st.text("abcdef", min_size=1, max_size=2), CLAIMS, min_size=1))
def test_all_is_given_and_the_unsatisfied_have_equal_shares(capacity: float, claims: dict[str, Claim]) -> None:
    shares = max_min(capacity, claims)
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(one.demand for one in claims.values())), abs=1e-6)
    assert all(share <= claims[flow].demand for flow, share in shares.items())
    levels = {flow: share / claims[flow].weight for flow, share in shares.items()}
    unsatisfied = [levels[flow] for flow, share in shares.items() if share < claims[flow].demand - 1e-6]
    if unsatisfied:
        assert min(unsatisfied) == pytest.approx(max(unsatisfied), abs=1e-6)
        assert max(levels.values()) <= max(unsatisfied) * (1.0 + 1e-6) + 1e-6
