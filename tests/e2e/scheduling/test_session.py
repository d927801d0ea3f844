"""The placement that keeps sessions together, from the bytes of a request to the replica that gets it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.proxies import FAST, HELLO, Answer, ProxyUnderTest, serving


async def ask(proxy: ProxyUnderTest, place: str, user: str) -> Answer:
    """A request of `user`, who is named where the configuration looks for it."""
    body: dict[str, Any] = HELLO | ({"user": user} if place == "body:user" else {})
    headers = {"header:x-session-id": {"x-session-id": user}, "cookie:sid": {"cookie": f"a=1; sid={user}"}}
    answer = await proxy.chat(body, headers=headers.get(place, {}))
    assert answer.status == 200
    return answer


@pytest.mark.parametrize("place", ["header:x-session-id", "cookie:sid", "body:user"])
async def test_the_requests_of_a_session_stay_together(place: str) -> None:
    users = [f"user-{i}" for i in range(12)]
    async with serving(FAST, FAST, FAST, scheduling={"placement": "session", "session": place}) as proxy:
        before = {user: (await ask(proxy, place, user)).backend for user in users}
        assert len(set(before.values())) == 3
        assert {user: (await ask(proxy, place, user)).backend for user in reversed(users)} == before
