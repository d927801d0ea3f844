"""The connection from a member to the leader of a shard."""

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
"""How long connecting may take, until the leader's Welcome."""


class LeaderLink:
    """A connection to a leader. It is usable once the leader has sent its Welcome."""

    def __init__(
        self, leadership: Leadership, handle: Callable[[LeaderLink, ToMember], None],
        lost: Callable[[LeaderLink, str], None],
    ) -> None:  # fmt: skip
        """`handle` gets each message of the leader, and `lost` the reason when the connection ends."""
        self.leadership = leadership
        self.channel: MemberChannel[ToMember] = MemberChannel(
            TO_MEMBER, lambda message: handle(self, message), lambda: lost(self, self._end_reason())
        )
        self.calls = Calls(self.channel, count(-1, -1))
        self.refusal: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None once the leader has welcomed this member, else the reason why not."""

    async def open(self, network: Network, me: Hello) -> str | None:
        """Connect, and wait for the Welcome. Returns None on success, else the reason of the failure."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await network.connect(self.leadership.address, lambda: self.channel)
                self.channel.send(me)
                return await self.refusal
        except (OSError, ValueError) as error:
            return str(error) or "no answer"

    def _end_reason(self) -> str:
        if self.refusal.done():
            return "the connection ended"
        return "the connection ended before an answer, as where only one of two members uses TLS"

    def set_refusal(self, why: str | None) -> None:
        """Resolve `refusal`, unless it already is."""
        if not self.refusal.done():
            self.refusal.set_result(why)
