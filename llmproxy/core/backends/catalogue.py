"""The model names that clients may use, with their pools and adapters, built from the model lists of backends."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from xxhash import xxh64_intdigest

from llmproxy.core.domain import Listing, ModelCard, Outcome, Refused

Aliases = Mapping[str, str | Mapping[str, float]]
"""Maps each alias to its target name, or to several target names with their shares of its requests."""
ANY = "*"  # The alias for all names without an alias.
NAME_CHARS_MAX = 1_024  # Maximum length of a name that `unlisted` passes through, because it is stored and logged.
RETRY_UNREAD_S = 1.0  # `Retry-After` while a name may soon be served: about the poll interval of a failed backend.


@dataclass(frozen=True, slots=True)
class Target:
    """The model, pool and adapter of a requested name."""

    requested: str
    model: str  # A name that backends list. For an adapter that is loaded on demand, its base model.
    pool: str
    adapter: str | None  # Name of the adapter if the target is one; None for a base model.
    context_tokens: int | None = None  # Longest context of the backends that list the name; None if unpublished.


class Catalogue:
    """Maps names to pools and adapters. The mapping is rebuilt whenever a model list changes.

    Backends with a common base model are in one pool, and pools with a common backend are one pool. An adapter belongs
    to the pool of the backend that lists it. The name of a pool is the base model that most of its backends list; on a
    tie, the base model that is first in most lists, then the first in alphabetical order. So the name depends on the
    model lists alone, and a roll-out from one served name to another changes it once. A name in `named` takes
    precedence over these rules. The lists of backends that are down still count.
    """

    def __init__(self, backends: Iterable[str], aliases: Aliases) -> None:
        self.aliases: Aliases = dict(aliases)
        self.served: Mapping[str, Target] = {}  # The target of each name that a backend lists.
        self.targets: Mapping[str, Target] = {}  # The target of each name and alias with a single target.
        self.names: Mapping[str, frozenset[str]] = {}  # The base models of each pool.
        self.members: Mapping[str, str] = {}  # The pool of each backend that lists a base model.
        self._pool_named: Mapping[str, str] = {}
        self._listings: dict[str, Listing | None] = dict.fromkeys(backends)
        self._cards: dict[str, ModelCard] = {}
        self._unread = set(self._listings)
        self._names_text: str | None = None
        # Adapters that backends should have by `Adapters`, loaded or not. Requests for them may be retried.
        self.promised: frozenset[str] = frozenset()
        self.named: frozenset[str] = frozenset()  # Pools of `scaling.pools`, which may have no backend at the moment.
        # Names, or patterns that end in `*`, that clients may use before a backend lists them -> base model.
        self.unlisted: Mapping[str, str] = {}
        self.external: frozenset[str] = frozenset()  # Models that external backends serve. Replicas may serve them too.
        self._silent: set[str] = set()  # Backends of `_unread` whose polls failed.
        self.expecting: Collection[str] = ()  # Sources that have not answered, and may add backends.
        self.ever_read = False  # Whether any backend was read since the start of the process.
        self.revision = 0  # Increases whenever `targets` or `pools` may have changed.

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self.names)

    @property
    def complete(self) -> bool:
        """Whether there are backends, all of them have listed their models, and discovery adds no more."""
        return not self.expecting and bool(self._listings) and not self._unread

    @property
    def all_polled(self) -> bool:
        """Whether discovery adds no more backends, and each backend has listed its models or failed a poll."""
        return not self.expecting and self._unread <= self._silent

    def silent(self, backend: str) -> None:
        """Notes a failed poll of a backend."""
        if backend in self._unread:
            self._silent.add(backend)

    def _only_external(self, model: str | None) -> bool:
        """Returns whether a model is at external backends alone: no replica lists it, and none is about to answer."""
        return model in self.external and model not in self.served and self.all_polled

    def add(self, backend: str) -> None:
        if self._listings.setdefault(backend, None) is None:
            self._unread.add(backend)

    def remove(self, backend: str) -> None:
        """Removes a backend, and the names that only this backend listed."""
        del self._listings[backend]
        self._unread.discard(backend)
        self._silent.discard(backend)
        self._rebuild()

    def rename(self, aliases: Aliases) -> None:
        self.aliases = dict(aliases)
        self._rebuild()

    def resolve_alias(self, name: str | None, key: str = "", beside: str | None = None) -> str | None:
        """Returns the target of an alias, or the base model of an adapter of `unlisted`. Returns other names unchanged.

        An alias may have several targets with weights. Targets that the backend `beside` serves come first, then
        targets that may be served now. Requests with the same `key` get the same target.
        """
        targets = None if name is None else self._alias_targets(name)
        if targets is None or isinstance(targets, str):
            return targets
        listing = None if beside is None else self._listings.get(beside)
        eligible = targets.keys() & {card.name for card in listing.cards} if listing is not None else set()
        known = self.served.keys() | self.named | self.promised
        eligible = eligible or targets.keys() & known or set(targets)
        return _choose({one: weight for one, weight in targets.items() if one in eligible}, f"{name}\0{key}")

    def _unlisted_entry(self, name: str) -> str | None:
        """Returns the longest entry of `unlisted` that covers a name. Returns None for aliases and base models."""
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

    def _alias_targets(self, name: str) -> str | Mapping[str, float]:
        if self.unlisted and (entry := self._unlisted_entry(name)) is not None:
            return self.unlisted[entry]
        # Aliases are not followed recursively, so that an alias can be its own target.
        return self.aliases.get(name) or self.aliases.get(ANY, name)

    def pool_of(self, backend: str) -> str | None:
        """Returns the pool of a backend; None if the backend has not listed its models or lists no base model."""
        return self.members.get(backend)

    def pool_named(self, name: str) -> str:
        """Returns the pool of a base model; `name` itself if no backend lists it."""
        return self._pool_named.get(name, name)

    def listed(self, backend: str, listing: Listing) -> bool:
        """Stores a backend's model list. Returns whether it differs from the last one."""
        before = self._listings.get(backend)
        self._unread.discard(backend)
        self._silent.discard(backend)
        self.ever_read = True
        if before is not None and _alike(before.cards, listing.cards):
            return False
        self._listings[backend] = listing
        self._rebuild()
        return True

    def resolve(self, name: str | None, key: str = "", beside: str | None = None) -> Target:
        """Returns the target of a requested name. As in vLLM, None selects the base model of the only pool.

        Among the targets of an alias, `key` and `beside` decide as in `resolve_alias`.

        Raises Refused: with `rejected_no_backends` if the name may be served soon (a backend has not listed its models
        yet, the adapter will be loaded, or a backend of the pool started); with `bad_request` if `name` is None while
        there are several pools or none; else with `unknown_model`.
        """
        if name is None:
            return self._only_pool()
        target = self.targets.get(name)
        if target is not None:
            return target
        if self.unlisted and (entry := self._unlisted_entry(name)) is not None:
            # Clients choose such names, so metrics count them under the entry of `unlisted`.
            return replace(self.resolve(self.unlisted[entry]), requested=entry, adapter=name)
        model = self.resolve_alias(name, key, beside)
        assert model is not None
        if model in self.served:
            # Clients choose the names that `*` maps, so metrics count such a name under its target.
            known = name in self.aliases or name in self.served
            return replace(self.served[model], requested=name) if known else self.served[model]
        if self._only_external(model):
            return Target(name, model, model, None)
        if model in self.promised:
            message = f"No backend has the adapter `{name}` loaded at the moment. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_UNREAD_S)
        if model in self.named:
            message = f"No replica of `{name}` is up at the moment; one was asked for. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_UNREAD_S)
        if not self.ever_read:
            message = (
                f"No backend's models could be read since the start, so `{name}` is not known: see the proxy's log."
            )
            raise Refused(Outcome.REJECTED_NO_BACKENDS, f"{message} Try again shortly.", RETRY_UNREAD_S)
        if not self.complete:
            raise Refused(
                Outcome.REJECTED_NO_BACKENDS,
                f"The model `{name}` is not known yet, and {len(self._unread)} of {len(self._listings)} backends never "
                f"answered so far. Known models: {self._known_names()}. Try again shortly.",
                RETRY_UNREAD_S,
            )
        what = f"The model `{name}` does not exist"
        if model != name:
            what = f"The model `{name}` is an alias of `{model}`, which no backend serves"
        raise Refused(Outcome.UNKNOWN_MODEL, f"{what}. Known models: {self._known_names()}.")

    def awaits(self, name: str | None) -> bool:
        """Returns whether `name`, a result of `resolve_alias`, may become known later.

        True if a backend has not listed its models yet, or if the adapter is promised. None, for a request
        without a model, awaits the first pool.
        """
        if name is None:
            return not self.pools and not self.complete
        if name in self.served or self._only_external(name):
            return False
        return name in self.promised or not self.complete

    def models(self) -> list[dict[str, Any]]:
        """Returns the entries of `/v1/models`: base models, then adapters, then configured aliases."""
        cards = sorted(self._cards.items(), key=lambda item: (item[1].parent is not None, item[0]))
        entries: list[dict[str, Any]] = [{**card.fields, "id": name} for name, card in cards]
        for alias in sorted(self.aliases.keys() - self._cards.keys() - {ANY}):
            card = next((self._cards[name] for name in _names(self.aliases[alias]) if name in self._cards), None)
            if card is not None:
                entries.append({**card.fields, "id": alias, "root": card.name, "parent": card.parent})
        return entries

    def model(self, name: str) -> dict[str, Any]:
        """Returns the entry of a name that `models` need not list, such as a name that `*` maps.

        Raises Refused as `resolve` does.
        """
        model = self.resolve(name).model
        if (card := self._cards.get(model)) is None:
            # Only external backends have the model, and they list no fields.
            return {"id": name, "object": "model", "root": model, "parent": None}
        return {**card.fields, "id": name, "root": card.name, "parent": card.parent}

    def _known_names(self) -> str:
        # Cached, because thousands of requests may be refused at once while backends list hundreds of names.
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
        message = "The request names no model, which is possible only while one model is served: set `model` to one of "
        raise Refused(Outcome.BAD_REQUEST, message + (", ".join(self.pools[:20]) or "none (no model is served)") + ".")

    def _rebuild(self) -> None:
        """Computes pools, members and targets again from the model lists of all backends, and increases `revision`."""
        listings = {backend: listing for backend, listing in sorted(self._listings.items()) if listing is not None}
        bases = {name: [card.name for card in one.cards if card.parent is None] for name, one in listings.items()}
        bases = {backend: names for backend, names in bases.items() if names}
        listed = Counter(name for names in bases.values() for name in set(names))
        first = Counter(names[0] for names in bases.values())

        def rank(name: str) -> tuple[bool, int, int, str]:
            return name not in self.named, -listed[name], -first[name], name

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
                    target = targets.get(card.name)
                    if target is None:
                        adapter = card.name if adapters else None
                        targets[card.name] = Target(card.name, card.name, pool, adapter, longest)
                        cards[card.name] = card
                    elif longest is not None and target.pool == pool and longest > (target.context_tokens or 0):
                        targets[card.name] = replace(target, context_tokens=longest)
        self.served, self._cards = targets, cards
        resolved = ((name, self._alias_targets(name)) for name in (targets.keys() | self.aliases) - {ANY})
        self.targets = {
            name: replace(targets[target], requested=name)
            for name, target in resolved
            if isinstance(target, str) and target in targets and self._unlisted_entry(name) is None
        }
        self._names_text = None
        self.revision += 1


def _alike(some: tuple[ModelCard, ...], others: tuple[ModelCard, ...]) -> bool:
    """Returns whether two model lists have the same names, base models, context lengths and paths, in the same order.

    Nothing else counts, because vLLM makes `created` and the id in `permission` anew for each answer.
    """
    return len(some) == len(others) and all(
        one.name == other.name
        and one.parent == other.parent
        and one.max_model_len == other.max_model_len
        and one.fields.get("root") == other.fields.get("root")
        for one, other in zip(some, others, strict=True)
    )


def _names(targets: str | Mapping[str, float]) -> Iterable[str]:
    return (targets,) if isinstance(targets, str) else targets


def _choose(weights: Mapping[str, float], key: str) -> str:
    """Chooses a name for `key` by weight. The same key gets the same name, and a changed weight moves few keys."""
    ends = list(accumulate(weights.values()))
    point = xxh64_intdigest(key.encode("utf-8", "surrogatepass")) / 2**64 * ends[-1]
    # Rounding may put the largest hashes at the end of the last name.
    return list(weights)[min(bisect_right(ends, point), len(ends) - 1)]


def _joined(lists: Iterable[Iterable[str]]) -> list[frozenset[str]]:
    """Merges overlapping lists. Returns the resulting disjoint sets of names."""
    joined: list[frozenset[str]] = []
    for names in map(frozenset, lists):
        overlapping = [one for one in joined if one & names]
        joined = [one for one in joined if not one & names] + [names.union(*overlapping)]
    return joined
