"""The budget for request bodies is not exceeded, and large bodies are refused first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmproxy.gateway.request.body_budget import BodyBudget, BufferedBody


@given(st.lists(st.tuples(st.sampled_from(["came", "begins", "grows", "arrived", "over"]), st.integers(0, 60))))
def test_held_bytes_stay_within_the_budget_and_are_all_returned(steps: list[tuple[str, int]]) -> None:
    budget = BodyBudget()
    budget.limit(100, 40)
    held: list[BufferedBody] = []
    for step, size in steps:
        one = held[size % len(held)] if held else BufferedBody(budget)
        if step in ("came", "begins"):
            held.append(BufferedBody(budget))
            if step == "begins":
                held[-1].begin(lambda: None)
            else:
                held[-1].add_whole(size)
        elif step == "grows":
            was, largest = one.on_refused is not None, max(each.size for each in held) if held else 0
            refused_before, held_before = {each for each in held if each.refused}, budget.buffered_bytes
            grew = one.add_piece(size)
            assert grew is was or held_before + size > 87, "there was room"
            for each in {each for each in held if each.refused} - refused_before:
                assert each.size == 0, "its bytes are free"
            assert one.size <= largest + size
        elif step == "arrived":
            one.finish()
        else:
            one.release()
        assert budget.buffered_bytes == sum(each.size for each in held) <= 100
        assert budget.arriving_bytes == sum(each.size for each in held if each.on_refused is not None)
    for each in held:
        each.release()
    assert (budget.buffered_bytes, budget.arriving_bytes) == (0, 0)


def test_a_largest_arriving_body_is_refused_and_none_in_vain() -> None:
    budget = BodyBudget()
    budget.limit(1_600, 100)
    cut: list[int] = []
    arriving = [BufferedBody(budget) for _ in range(3)]
    for number, body in enumerate(arriving):
        body.begin(lambda number=number: cut.append(number))  # type: ignore[misc]
        assert body.add_piece((100, 900, 300)[number])
    assert arriving[0].add_piece(150)
    assert (cut, arriving[1].refused) == ([1], True)
    assert BufferedBody(budget).add_whole(900)
    assert cut == [1], "it fits beside the arriving bodies"
    assert not arriving[2].add_piece(300), "it would not fit without the others either"
    assert cut == [1]
    assert budget.buffered_bytes == 900 + 250
