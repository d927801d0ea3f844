"""Session affinity: home backends, moves of sessions, and the load bound of a home backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed
from llmproxy.core.placement.policy import make
from llmproxy.core.placement.session import BOUND, IDLE
from tests.core.make import request, view
from tests.sizes import examples

NONE: frozenset[str] = frozenset()
SESSIONS = [f"s{i}" for i in range(2000)]
NAMES = "abcdefgh"


def place(session: str | None, views: Sequence[View], ceiling: float = 1.0, excluded: frozenset[str] = NONE) -> Placed:
    placed = make("session", Random(7)).place(request(session=session), views, ceiling, excluded, 0.0)
    assert isinstance(placed, Placed), placed
    return placed


def homes(views: Sequence[View]) -> dict[str, str]:
    return {session: place(session, views).backend for session in SESSIONS}


def idle(names: str = NAMES) -> list[View]:
    return [view(name) for name in names]


# --- homes ------------------------------------------------------------------------------------------------------------


def test_homes_are_spread_evenly_in_any_order_of_backends() -> None:
    found = homes(idle())
    counted = Counter(found.values())
    assert all(250 * 0.75 <= counted[name] <= 250 * 1.25 for name in NAMES), counted
    assert homes(idle()[::-1]) == found


def test_leaving_backend_moves_only_its_own_sessions() -> None:
    before = homes(idle())
    for gone in "ah":
        left = [view(name, available=name != gone) for name in NAMES]
        after = homes(left)
        assert {session for session in SESSIONS if after[session] != before[session]} == {
            session for session, home in before.items() if home == gone
        }
        taken = Counter(after[session] for session, home in before.items() if home == gone)
        assert len(taken) == 7
    assert homes(idle()) == before


def test_new_backend_takes_its_share_and_nothing_else_moves() -> None:
    before, after = homes(idle()), homes(idle(NAMES + "i"))
    moved = {session for session in SESSIONS if after[session] != before[session]}
    assert {after[session] for session in moved} == {"i"}
    assert 2000 / 9 * 0.75 <= len(moved) <= 2000 / 9 * 1.25


def test_failed_or_full_home_gives_way_to_the_next() -> None:
    home = place("s", idle()).backend
    second = place("s", idle(), excluded=frozenset({home})).backend
    full = [view(name, load=10 if name == home else 9) for name in NAMES]
    assert place("s", full).backend == second != home


# The choices must not depend on the string hashing of the process.
SCRIPT = """
from random import Random
from llmproxy.core.placement.policy import make
from tests.core.make import request, view
views = [view(name) for name in "abcdefgh"]
place = make("session", Random(7)).place
print(*(place(request(session=f"s{i}"), views, 1.0, frozenset(), 0.0).backend for i in range(50)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_every_process_knows_the_same_homes(hash_seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [place(session, idle()).backend for session in SESSIONS[:50]]


def test_homes_are_the_same_in_every_version() -> None:
    assert "".join(place(session, idle()).backend for session in SESSIONS[:16]) == "ddcfbdcgefhgaehe"


def test_without_a_session_the_least_load_for_its_size_wins() -> None:
    views = [view("small", limit=10, load=2), view("big", limit=100, load=10), view("mid", limit=50, load=9)]
    assert {place(None, views).backend for _ in range(5)} == {"big"}
    assert dict(place(None, views).terms) == {"load": 0.1}


# --- the bound --------------------------------------------------------------------------------------------------------


def sent(fleet: Mapping[str, int], sessions: Sequence[str]) -> Counter[str]:
    """Place requests of these sessions that never end. `fleet` has the size of each backend."""
    loads: Counter[str] = Counter()
    for session in sessions:
        loads[place(session, [view(name, limit=limit, load=loads[name]) for name, limit in fleet.items()]).backend] += 1
    return loads


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.sampled_from((8, 32, 64, 200)), min_size=1, max_size=6),
    st.lists(st.sampled_from("stuvw"), min_size=1, max_size=60),
)
def test_no_backend_has_more_than_its_bounded_share(limits: list[int], sessions: list[str]) -> None:
    fleet = dict(zip(NAMES, limits, strict=False))
    size, total = sum(limits), min(len(sessions), sum(limits))
    loads = sent(fleet, sessions[:total])
    for name, limit in fleet.items():
        assert loads[name] <= max(ceil(IDLE * limit), ceil(BOUND * total * limit / size)), loads


def test_one_hot_session_overflows_in_its_own_order_of_backends() -> None:
    fleet = dict.fromkeys(NAMES, 64)
    loads = sent(fleet, ["hot"] * 205)
    order = [place("hot", idle())]
    while len(order) < len(NAMES):
        order.append(place("hot", idle(), excluded=frozenset(placed.backend for placed in order)))
    by_order = [loads[placed.backend] for placed in order]
    assert by_order == sorted(by_order, reverse=True)
    assert by_order[0] == ceil(BOUND * 205 / 8)


def test_a_few_requests_move_nobody_from_a_home() -> None:
    home = place("s", idle()).backend
    for load, stays in ((7, True), (8, False)):
        views = [view(name, limit=64, load=load if name == home else 0) for name in NAMES]
        assert (place("s", views).backend == home) is stays


def test_the_decision_says_how_far_from_home_it_is() -> None:
    first = place("s", idle())
    assert dict(first.terms) == {"rank": 0, "load": 0.0}
    busy = [view(name, load=9 if name == first.backend else 2) for name in NAMES]
    assert dict(place("s", busy).terms) == {"rank": 1, "load": 0.2}
    assert place("s", busy).candidates == 8
