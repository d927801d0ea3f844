"""The sums of requests that wait for a backend, compared with a list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.domain import NoMatch
from llmproxy.core.queueing.claims import Claims
from tests.core.make import request


def claim(backend: str, prefill_s: float = 1.0) -> NoMatch:
    return NoMatch(whole_model=False, later=backend, prefill_s=prefill_s)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["a", "b", None]), st.integers(-1, 1), st.integers(0, 9)),
        max_size=30,
    ),
    st.integers(-1, 1),
)
def test_sums_are_those_of_the_other_requests_of_the_band_and_above(
    steps: list[tuple[int, str | None, int, int]], band: int
) -> None:
    claims, waiting = Claims(), dict[str, tuple[str, int, int]]()
    for number, backend, own_band, prefill_s in steps:
        name = str(number)
        level = waiting[name][1] if name in waiting else own_band
        if backend is not None:
            claims.add(request(id=name, band=level), claim(backend, prefill_s), 0.0)
            waiting[name] = backend, level, prefill_s
        elif name in waiting:
            claims.drop(name)
            del waiting[name]
    assert claims.backends == {name: one[0] for name, one in waiting.items()}
    for name in (*waiting, "new"):
        level = waiting[name][1] if name in waiting else band
        for backend in "ab":
            others = [one for other, one in waiting.items() if other != name and one[0] == backend and one[1] >= level]
            count, prompts_s = claims.others(request(id=name, band=level), backend)
            assert (count, round(prompts_s, 9)) == (len(others), sum(prompt_s for _, _, prompt_s in others))


def test_request_that_changes_its_backend_has_waited_since_its_first_claim() -> None:
    claims, one = Claims(), request(id="one")
    claims.add(one, claim("a"), 1.0)
    claims.add(one, claim("b"), 3.0)
    assert (claims.waited_s(one, "b", 4.0), claims.waited_s(one, "a", 4.0)) == (3.0, 0.0)
    claims.drop("one")
    claims.add(one, claim("b"), 5.0)
    assert claims.waited_s(one, "b", 6.0) == 1.0
