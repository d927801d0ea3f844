"""The connection of a member to the leader of a shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from llmproxy.remote.cluster.channel import MemberChannel
from llmproxy.remote.cluster.election import Leadership
from llmproxy.remote.cluster.network import Network
from llmproxy.remote.cluster.protocol import TO_MEMBER, Hello, ToMember
from llmproxy.remote.workers.remote import Calls

CONNECT_S = 2.0
"""How long a leader may take until it has taken in a member that connects."""


class LeaderLink:
    """One connection. It is of use once the leader has taken this member in."""

    def __init__(
        self, leadership: Leadership, take: Callable[[LeaderLink, ToMember], None],
        lost: Callable[[LeaderLink, str], None],
    ) -> None:  # fmt: skip
        """`take` gets each message of the leader, and `lost` why the connection ended."""
        self.leadership = leadership
        self.channel: MemberChannel[ToMember] = MemberChannel(
            TO_MEMBER, lambda message: take(self, message), lambda: lost(self, self._ended())
        )
        self.calls = Calls(self.channel, count(-1, -1))
        self.answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None once the leader took this member in, or why it did not."""

    async def open(self, network: Network, me: Hello) -> str | None:
        """Connect, and wait to be taken in. Why that was not so; None where it was."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await network.connect(self.leadership.address, lambda: self.channel)
                self.channel.send(me)
                return await self.answer
        except (OSError, ValueError) as error:
            return str(error) or "no answer"

    def _ended(self) -> str:
        if self.answer.done():
            return "the connection ended"
        return "the connection ended before an answer, as where only one of two members uses TLS"

    def answered(self, why: str | None) -> None:
        if not self.answer.done():
            self.answer.set_result(why)
