"""The model names that clients may use, and the pool and adapter that each one means, learned from the backends."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from xxhash import xxh64_intdigest

from llmproxy.core.domain import Listing, ModelCard, Outcome, Refused

Aliases = Mapping[str, str | Mapping[str, float]]
"""The name that each alias stands for, or those that share its requests, with their weights."""
ANY = "*"
"""The alias that is every name which is no other alias."""
NAME_CHARS_MAX = 1_024
"""Of a model or an adapter. Longer names of clients are let through to no backend: they are kept and logged."""
RETRY_UNREAD_S = 1.0
"""Retry-After while a configured backend was never read: about the time until a poll finds it."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a requested name means.

    `model` is a name that the backends list; `adapter` is None for a base model. An adapter that they load when it is
    first asked for may be in no list: `model` is its base model then. `context_tokens` is the longest
    context of a backend that lists the name, None where no backend publishes it.
    """

    requested: str
    model: str
    pool: str
    adapter: str | None
    context_tokens: int | None = None


class Catalogue:
    """Name -> (pool, adapter), rebuilt whenever a listing changes.

    Backends that list a base model in common are in one pool, and so are backends that a third one joins in this way.
    Adapters join nothing: they belong to the pool of the backend that lists them. A pool has the name that most of its
    backends list, of several the one that most list first, then the first by the alphabet. So the name depends on the
    listings alone, and a roll-out from one served name to another changes it once. A name in `apart` or `named` comes
    before all others and pins it. Listings of backends that are down still count.

    `aliases` are configured. `promised` are adapters that a backend is being asked to load: a request for one is
    early, not wrong. `named` are pools that may have no backend at the moment, `apart` those that are a shard of their
    own. `expecting` says that discovery will still name backends.
    """

    def __init__(self, backends: Iterable[str], aliases: Aliases) -> None:
        self.aliases: Aliases = dict(aliases)
        self.served: Mapping[str, Target] = {}
        """Every name that a backend lists, and what it means there."""
        self.targets: Mapping[str, Target] = {}
        """Every known name that always means the same, and what it means to clients."""
        self.names: Mapping[str, frozenset[str]] = {}
        """Pool -> the base models that its backends list."""
        self.members: Mapping[str, str] = {}
        """Backend -> its pool; without those that were never read."""
        self._pool_named: Mapping[str, str] = {}
        self._listings: dict[str, Listing | None] = dict.fromkeys(backends)
        self._cards: dict[str, ModelCard] = {}
        self._unread = set(self._listings)
        self._names_text: str | None = None
        self.promised: frozenset[str] = frozenset()
        self.named: frozenset[str] = frozenset()
        self.apart: frozenset[str] = frozenset()
        self.unlisted: Mapping[str, str] = {}
        """See `Settings.unlisted`."""
        self.expecting = False
        self.ever_read = False
        """Whether any backend was read since the start of the process."""
        self.revision = 0
        """Increases whenever `targets` or `pools` may have changed."""

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of all pools, sorted."""
        return tuple(self.names)

    @property
    def complete(self) -> bool:
        """There is a backend, each was read at least once, and no more are expected."""
        return not self.expecting and bool(self._listings) and not self._unread

    def add(self, backend: str) -> None:
        """Add a backend of which nothing is known yet."""
        if self._listings.setdefault(backend, None) is None:
            self._unread.add(backend)

    def remove(self, backend: str) -> None:
        """Remove a backend, and the names that it alone listed."""
        del self._listings[backend]
        self._unread.discard(backend)
        self._rebuild()

    def rename(self, aliases: Aliases) -> None:
        """Replace the configured aliases."""
        self.aliases = dict(aliases)
        self._rebuild()

    def meant(self, name: str | None, key: str = "", beside: str | None = None) -> str | None:
        """The name that backends know for a requested one.

        Where several share an alias, requests with the same `key` get the same one, of those that may be served now.
        What the backend `beside` serves comes before all others.
        """
        stands_for = None if name is None else self._stands_for(name)
        if stands_for is None or isinstance(stands_for, str):
            return stands_for
        listing = None if beside is None else self._listings.get(beside)
        there = stands_for.keys() & {card.name for card in listing.cards} if listing is not None else set()
        there = there or {one for one in stands_for if self._may_be_served(one)} or set(stands_for)
        return _drawn({one: weight for one, weight in stands_for.items() if one in there}, f"{name}\0{key}")

    def _let_through(self, name: str) -> str | None:
        """The key of `unlisted` that covers a name, of several the longest; None for what is known otherwise."""
        served = self.served.get(name)
        if (
            not self.unlisted
            or len(name) > NAME_CHARS_MAX
            or name in self.aliases
            or (served is not None and served.adapter is None)
        ):
            return None
        covers = (key for key in self.unlisted if key == name or (key[-1:] == ANY and name.startswith(key[:-1])))
        return max(covers, key=len, default=None)

    def _stands_for(self, name: str) -> str | Mapping[str, float]:
        if self.unlisted and (entry := self._let_through(name)) is not None:
            return self.unlisted[entry]
        # An alias is followed once, so that its own name can be one of those that share it.
        return self.aliases.get(name) or self.aliases.get(ANY, name)

    def _may_be_served(self, name: str) -> bool:
        return name in self.served or name in self.named or name in self.promised

    def pool_of(self, backend: str) -> str | None:
        """The pool of a backend; None where it was never read or lists no base model."""
        return self.members.get(backend)

    def pool_named(self, name: str) -> str:
        """The pool whose backends list this base model; the name itself where no backend lists it."""
        return self._pool_named.get(name, name)

    def listed(self, backend: str, listing: Listing) -> bool:
        """Store a backend's listing. True when names or pools changed."""
        known = self._listings.get(backend)
        self._listings[backend] = listing
        self._unread.discard(backend)
        self.ever_read = True
        if known is not None and known.cards == listing.cards:
            return False
        self._rebuild()
        return True

    def resolve(self, name: str | None, key: str = "", beside: str | None = None) -> Target:
        """What `name` means; None means the base model of the only pool, as in vLLM. `key` and `beside`: see `meant`.

        Raises Refused with `unknown_model`, or with `rejected_no_backends` while an unread backend might still know the
        name or the adapter is promised.
        """
        if name is None:
            return self._only_pool()
        target = self.targets.get(name)
        if target is not None:
            return target
        if self.unlisted and (entry := self._let_through(name)) is not None:
            # Clients make up such names, so that they count as the entry that lets them through.
            return replace(self.resolve(self.unlisted[entry]), requested=entry, adapter=name)
        meant = self.meant(name, key, beside)
        assert meant is not None
        if meant in self.served:
            # Clients make up names, and `*` takes them all: those that nobody configured count as what they mean.
            known = name in self.aliases or name in self.served
            return replace(self.served[meant], requested=name) if known else self.served[meant]
        if meant in self.promised:
            message = f"No backend has the adapter `{name}` loaded at the moment. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_UNREAD_S)
        if meant in self.named:
            message = f"No replica of `{name}` is up at the moment; one was asked for. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_UNREAD_S)
        if not self.ever_read:
            message = f"No backend has answered since the start, so `{name}` is not known; the proxy's log says why."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, f"{message} Try again shortly.", RETRY_UNREAD_S)
        if not self.complete:
            raise Refused(
                Outcome.REJECTED_NO_BACKENDS,
                f"The model `{name}` is not known yet, and {len(self._unread)} of {len(self._listings)} backends never "
                f"answered so far. Known models: {self._known_names()}. Try again shortly.",
                RETRY_UNREAD_S,
            )
        what = f"The model `{name}` does not exist"
        if meant != name:
            what = f"The model `{name}` stands for `{meant}`, which no backend serves"
        raise Refused(Outcome.UNKNOWN_MODEL, f"{what}. Known models: {self._known_names()}.")

    def awaits(self, name: str | None) -> bool:
        """Whether a name that `meant` returned may become known: `resolve` raises `rejected_no_backends`."""
        if name is None:
            return not self.pools and not self.complete
        return name not in self.served and (name in self.promised or not self.complete)

    def models(self) -> list[dict[str, Any]]:
        """The entries of `/v1/models`: the fields of every card, base models first, then the configured aliases."""
        cards = sorted(self._cards.items(), key=lambda item: (item[1].parent is not None, item[0]))
        entries: list[dict[str, Any]] = [{**card.fields, "id": name} for name, card in cards]
        for alias in sorted(self.aliases.keys() - self._cards.keys() - {ANY}):
            card = next((self._cards[name] for name in _names(self.aliases[alias]) if name in self._cards), None)
            if card is not None:
                entries.append({**card.fields, "id": alias, "root": card.name, "parent": card.parent})
        return entries

    def _known_names(self) -> str:
        # Kept, because thousands of requests may be refused at once where backends list hundreds of names.
        if self._names_text is None:
            shared = {name for name in self.aliases if any(one in self.served for one in _names(self.aliases[name]))}
            self._names_text = ", ".join(sorted({*self.served, *shared} - {ANY})[:20]) or "none"
        return self._names_text

    def _only_pool(self) -> Target:
        # A backend that never answers must not fail every request without a name.
        if len(self.pools) == 1:
            pool = self.pools[0]
            return self.served[pool]
        if not self.complete and not self.pools:
            message = "The request names no model, and no backend has answered so far. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_UNREAD_S)
        message = "The request names no model, and there is not exactly one to choose: set `model` to one of "
        raise Refused(Outcome.BAD_REQUEST, message + (", ".join(self.pools[:20]) or "none (no model is served)") + ".")

    def _rebuild(self) -> None:
        listings = {backend: listing for backend, listing in sorted(self._listings.items()) if listing is not None}
        bases = {backend: names for backend, listing in listings.items() if (names := _base_models(listing))}
        listed = Counter(name for names in bases.values() for name in set(names))
        first = Counter(names[0] for names in bases.values())

        def rank(name: str) -> tuple[bool, bool, int, int, str]:
            return name not in self.apart, name not in self.named, -listed[name], -first[name], name

        self.names = dict(sorted((min(names, key=rank), names) for names in _joined(bases.values())))
        self._pool_named = {name: pool for pool, names in self.names.items() for name in names}
        self.members = {backend: self._pool_named[names[0]] for backend, names in bases.items()}
        targets: dict[str, Target] = {}
        cards: dict[str, ModelCard] = {}
        # A name that is both a base model and an adapter is a base model.
        for adapters in (False, True):
            for backend, pool in self.members.items():
                listing = listings[backend]
                longest = max((card.max_model_len or 0 for card in listing.cards), default=0) or None
                for card in listing.cards:
                    if (card.parent is not None) is not adapters:
                        continue
                    known = targets.get(card.name)
                    if known is None:
                        adapter = card.name if adapters else None
                        targets[card.name] = Target(card.name, card.name, pool, adapter, longest)
                        cards[card.name] = card
                    elif longest is not None and known.pool == pool and longest > (known.context_tokens or 0):
                        targets[card.name] = replace(known, context_tokens=longest)
        self.served, self._cards = targets, cards
        meanings = ((name, self._stands_for(name)) for name in (targets.keys() | self.aliases) - {ANY})
        self.targets = {
            name: replace(targets[meant], requested=name)
            for name, meant in meanings
            if isinstance(meant, str) and meant in targets and self._let_through(name) is None
        }
        self._names_text = None
        self.revision += 1


def _names(stands_for: str | Mapping[str, float]) -> Iterable[str]:
    return (stands_for,) if isinstance(stands_for, str) else stands_for


def _drawn(weights: Mapping[str, float], key: str) -> str:
    """One of these names, each for its share of all keys. A changed weight moves few of them."""
    ends = list(accumulate(weights.values()))
    point = xxh64_intdigest(key.encode("utf-8", "surrogatepass")) / 2**64 * ends[-1]
    # The largest hash is rounded up to the very end.
    return list(weights)[min(bisect_right(ends, point), len(ends) - 1)]


def _base_models(listing: Listing) -> tuple[str, ...]:
    return tuple(card.name for card in listing.cards if card.parent is None)


def _joined(lists: Iterable[Iterable[str]]) -> list[frozenset[str]]:
    """The names of these lists, those of lists that overlap together."""
    joined: list[frozenset[str]] = []
    for names in map(frozenset, lists):
        overlapping = [one for one in joined if one & names]
        joined = [one for one in joined if not one & names] + [names.union(*overlapping)]
    return joined
