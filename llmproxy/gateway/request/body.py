"""What all readers of request bodies share."""

from __future__ import annotations

import sys
from collections.abc import Callable

from llmproxy.gateway.request.json_scan import BadBody, Member, Slices, scan_every

# What is parsed in one go has at most so many bytes and values. Text costs by its bytes, and little; values cost an
# object each: a body of nothing but brackets would hold the loop for some 15 ms, and this many hold it for 2.
# `benchmarks/desk.py` measures it.
PARSE_BYTES_MAX = 128 * 1024
PARSE_VALUES_MAX = 16 * 1024

TRANSFER = ("kv_transfer_params", "ec_transfer_params")
"""Members by which an engine is told to read the cache of another or to keep its own for another, or dies of it: for
those who run engines, never for clients."""
# Members that hold the engine's own arguments, where transfer parameters count as well, and the way to them inside.
_ARGUMENTS = {"vllm_xargs": (), "sampling_params": ("extra_args",)}
PRIORITY = "priority"
GUARDED = frozenset({*TRANSFER, *_ARGUMENTS, PRIORITY})
"""The members by which a client could tell an engine what is not for it to say."""


_AT_ONCE_PART = 8
"""One part in so many of what bodies may hold is kept for those that come with their head."""


def parses_at_once(body: bytes) -> bool:
    """Whether a parser holds the loop for no more than about 2 ms; in doubt not, as text may hold brackets too."""
    if len(body) <= 2 * PARSE_VALUES_MAX:
        return True
    # Every value but the outermost follows an opening bracket or a comma.
    return len(body) <= PARSE_BYTES_MAX and sum(map(body.count, (b"[", b"{", b","))) <= PARSE_VALUES_MAX


def guarded_in(body: bytes, found: list[tuple[str, Member]]) -> Slices[tuple[tuple[str, Member], ...]]:
    """The transfer parameters and priorities among `found`. Raises BadBody for the former among engine arguments."""
    for name, member in found:
        if name in _ARGUMENTS:
            yield from _check_arguments(body[member.start : member.end], name, *_ARGUMENTS[name])
    return tuple((name, member) for name, member in found if name in TRANSFER or name == PRIORITY)


def _check_arguments(value: bytes, name: str, *path: str) -> Slices[None]:
    """Raise BadBody for transfer parameters in `value`, the JSON value of `name`, or below it at `path`."""
    if not value.startswith(b"{"):
        return
    for inner, member in (yield from scan_every(value, path[:1] or TRANSFER)):
        if inner in TRANSFER:
            raise BadBody(f"The field {name}.{inner} is not taken from clients.", f"body.{name}.{inner}")
        yield from _check_arguments(value[member.start : member.end], f"{name}.{inner}", *path[1:])


class Bodies:
    """The bytes of request bodies that one process has read and holds: arriving, waiting or sent out.

    Counted is what has come, not what was announced: who announces much and sends little keeps nobody out. Where what
    comes does not fit any more, one of the largest bodies that are still arriving is refused, and small ones go on.
    Bodies that take long to arrive leave a part of the whole to those that come with their head.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.arriving_bytes = 0
        # By the length of their size in bits: the largest, within a factor of two, is found without a search.
        self._arriving: dict[int, dict[HeldBody, None]] = {}
        self.bytes_max = self.slow_bytes_max = sys.maxsize

    def limit(self, bytes_max: int, body_bytes_max: int) -> None:
        """Hold to these limits, of all bodies and of one; what is held beyond them stays."""
        self.bytes_max = max(bytes_max, body_bytes_max)
        self.slow_bytes_max = max(self.bytes_max - self.bytes_max // _AT_ONCE_PART, body_bytes_max)

    def make_room(self, bytes_max: int) -> None:
        """Refuse bodies that arrive, the largest first, until no more than so many bytes are held."""
        while self.held_bytes > bytes_max and self._arriving:
            # Of those alike the one of which nothing came for longest.
            body = next(iter(self._arriving[max(self._arriving)]))
            body.refused = True
            cut = body.cut
            body.release()
            if cut is not None:
                cut()

    def arrives(self, body: HeldBody) -> None:
        self._arriving.setdefault(body.size.bit_length(), {})[body] = None
        self.arriving_bytes += body.size

    def arrives_no_more(self, body: HeldBody) -> None:
        group = self._arriving[body.size.bit_length()]
        del group[body]
        if not group:
            del self._arriving[body.size.bit_length()]
        self.arriving_bytes -= body.size


class HeldBody:
    """What one request holds of all that `bodies` may, until it is released."""

    __slots__ = ("_bodies", "cut", "refused", "size")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = 0
        self.refused = False
        self.cut: Callable[[], None] | None = None

    def came(self, size: int) -> bool:
        """A whole body came at once. False where it is not to be held."""
        bodies = self._bodies
        if bodies.held_bytes - bodies.arriving_bytes + size > bodies.bytes_max:
            return False
        self.size = size
        bodies.held_bytes += size
        bodies.make_room(bodies.bytes_max)
        return True

    def arriving(self, cut: Callable[[], None]) -> None:
        """It arrives in pieces; `cut` is called when another one makes it `refused`."""
        self.cut = cut
        self._bodies.arrives(self)

    def grown(self, size: int) -> bool:
        """So many bytes more of it came. False where it is refused."""
        bodies = self._bodies
        if self.cut is None:
            return False
        bodies.arrives_no_more(self)
        self.size += size
        bodies.held_bytes += size
        bodies.arrives(self)
        if bodies.held_bytes - bodies.arriving_bytes + self.size > bodies.slow_bytes_max:
            # Nor would it fit without all others that arrive.
            self.release()
            return False
        bodies.make_room(bodies.slow_bytes_max)
        return not self.refused

    def arrived(self) -> bool:
        """It is whole. False where it was refused before."""
        if self.cut is not None:
            self._bodies.arrives_no_more(self)
            self.cut = None
        return not self.refused

    def release(self) -> None:
        """It is not held any more; may be said again."""
        self.arrived()
        self._bodies.held_bytes -= self.size
        self.size = 0
