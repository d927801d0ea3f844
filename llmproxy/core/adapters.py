"""Records which LoRA adapters operators have loaded through the proxy, and on which backends.

The model lists of the backends show the loaded adapters. So a restart needs no special case: a backend that comes back
without a wanted adapter gets the load request again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmproxy.core.domain import Listing, ModelCard, Outcome, Refused
from llmproxy.core.pools import Pools

ADAPTERS_MAX = 1_024  # Maximum number of adapters with a record.
SHOWN_MAX = 4_096  # Maximum number of (adapter, backend) pairs that `states` returns.
BACKOFF_S = 1.0
BACKOFF_MAX_S = 60.0
RETRY_UNKNOWN_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class AdapterChange:
    """A request to load or unload an adapter on backends of a pool."""

    name: str
    pool: str
    path: str | None  # Path of the adapter on the backends. None: the change unloads the adapter.
    fields: Mapping[str, Any]  # The request body for the backends, in vLLM's format.
    in_place: bool = False  # Whether the change may replace a loaded adapter of the same name.

    @property
    def kind(self) -> str:
        return "unload" if self.path is None else "load"


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter change in progress, and the backends that it goes to."""

    change: AdapterChange
    backends: tuple[str, ...]  # The backends that get the change now.
    joining: bool  # Whether backends that join the pool later get the change too.


@dataclass(frozen=True, slots=True)
class Reply:
    """The response of one backend to an adapter change."""

    backend: str
    status: int | None  # HTTP status; None if the backend did not respond.
    taken: bool
    message: str  # The answer of the backend, or the reason why there is none, in words.


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an adapter change: the responses of its backends."""

    change: AdapterChange
    replies: tuple[Reply, ...]
    remembered: bool  # Whether the change is sent again later to backends that have not accepted it.


@dataclass(frozen=True, slots=True)
class AdapterOnBackend:
    """The state of an adapter on one backend."""

    backend: str
    wanted: str  # The change that the backend should have: "load" or "unload".
    done: bool  # Whether the backend shows the change. False while it is down: it may return with other adapters.
    failures: int  # Consecutive failures to send the change.


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The record of an adapter, for operators."""

    name: str
    pool: str
    path: str | None  # Path of the adapter on the backends; None if the adapter is only to be unloaded.
    joining: bool  # Whether backends that join the pool later get the adapter too.
    standings: tuple[AdapterOnBackend, ...]


@dataclass(slots=True)
class _Record:
    """The pending and accepted changes of one adapter, by backend."""

    pool: str
    wanted: dict[str, AdapterChange] = field(default_factory=dict)  # The change that each backend should take.
    joining: AdapterChange | None = None  # The change for backends that join the pool later.
    confirmed: dict[str, AdapterChange] = field(default_factory=dict)  # The last change that each backend took.
    failures: dict[str, tuple[int, float]] = field(default_factory=dict)  # Consecutive failures, time of the next try.

    @property
    def load(self) -> AdapterChange | None:
        loads = (change for change in self.wanted.values() if change.path is not None)
        return next(loads, self.joining)


class Adapters:
    """The adapters that operators changed through the proxy, and the change that each backend should have.

    Adapters of `--lora-modules`, or loaded past the proxy, are not here. Callers begin no change of an adapter while
    `is_changing` is true.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._catalogue = pools.catalogue
        self._records: dict[str, _Record] = {}
        self._changing: dict[str, AdapterPlan] = {}
        self._cards: dict[str, tuple[Listing, dict[str, ModelCard]]] = {}

    # --- requested changes --------------------------------------------------------------------------------------------

    def is_changing(self, name: str) -> bool:
        """Returns whether a change of this adapter is in progress. The next change must wait for its end."""
        return name in self._changing

    def load(
        self, name: str, path: str, fields: Mapping[str, Any], model: str | None, replicas: int | None, in_place: bool
    ) -> AdapterPlan:
        """Begins to load an adapter on `replicas` backends of the pool of `model`.

        Backends that have the adapter, or should have it, come first, then other backends that are up. Between equals,
        the backends with the fewest adapters come first. Every backend that should already have the adapter gets the
        load request too, even beyond `replicas`, so that all have the same weights. Raises Refused for an unsuitable
        name, path or number, if no backend serves the pool, or beyond ADAPTERS_MAX adapters.

        Args:
            model: None: the pool of the adapter, or the only pool.
            replicas: None: all backends of the pool.
        """
        pool = self._pool_for(name, model)
        self._check_name(name, pool)
        record = self._record(name)
        before = record.load if record is not None else None
        if before is not None and before.path != path and not in_place:
            message = f"The lora adapter '{name}' has already been loaded from another path. Unload it first, or set "
            raise Refused(Outcome.BAD_REQUEST, message + "'load_inplace' to True.")
        members = self._members(pool)
        if not members:
            message = f"No backend serves `{pool}` any more. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_UNKNOWN_S)
        if replicas is not None and replicas > len(members):
            message = f"`replicas` is {replicas}, and {len(members)} backends are known to serve `{pool}`."
            raise Refused(Outcome.BAD_REQUEST, message)
        loaded = {backend for backend in members if self._has_loaded(name, backend, path)}
        wanting = {b for b, change in record.wanted.items() if change.path is not None} if record is not None else set()

        def cost(backend: str) -> tuple[bool, bool, int, str]:
            return backend not in wanting | loaded, self._is_down(backend), self._adapter_count(backend), backend

        chosen = set(sorted(members, key=cost)[:replicas])
        joining = replicas is None or (record is not None and record.joining is not None)
        self._make_room(name)
        change = AdapterChange(name, pool, path, fields, in_place)
        return self._begin(AdapterPlan(change, tuple(sorted(chosen | wanting)), joining))

    def unload(self, name: str, fields: Mapping[str, Any], model: str | None, replicas: int | None) -> AdapterPlan:
        """Begins to unload an adapter from `replicas` of the backends that have it; None means all of them.

        The backends with the most adapters come first. Raises Refused, with `unknown_model` if no backend has the
        adapter.
        """
        pool = self._pool_for(name, model)
        record = self._record(name)
        wanted = record.wanted if record is not None and record.pool == pool else {}
        holders = [b for b in self._members(pool) if b in wanted or name in self._listed(b)]
        # A record without holders only has to be deleted: its backends now serve another model.
        if not holders and record is None:
            raise Refused(Outcome.UNKNOWN_MODEL, f"The lora adapter '{name}' cannot be found.")
        chosen = sorted(holders, key=lambda b: (-self._adapter_count(b), b))[:replicas]
        return self._begin(AdapterPlan(AdapterChange(name, pool, None, fields), tuple(sorted(chosen)), joining=False))

    def end(self, plan: AdapterPlan, replies: tuple[Reply, ...], now: float) -> Report:
        """Ends a change with the replies of its backends. Forgets the change if some replied and none accepted it."""
        change = plan.change
        del self._changing[change.name]
        answered = [reply for reply in replies if reply.status is not None]
        record = self._record(change.name) or _Record(change.pool)
        # An adapter that was loaded by hand in another pool can be unloaded, but its change is not remembered.
        remembered = record.pool == self._catalogue.pool_named(change.pool) and (
            not answered or any(reply.taken for reply in answered)
        )
        if remembered:
            self._records[change.name] = record
            record.joining = change if plan.joining else None
            members = self._members(record.pool)
            record.wanted = {b: c for b, c in record.wanted.items() if b in members}
            record.wanted |= dict.fromkeys((b for b in plan.backends if b in self._pools.backends), change)
            for reply in replies:
                record.failures.pop(reply.backend, None)
                self.replied(change, reply, now)
            self._tidy(change.name)
        return Report(change, replies, remembered)

    def abandon(self, plan: AdapterPlan) -> None:
        """Ends a change without recording it, because the task that sends it failed or was cancelled."""
        self._changing.pop(plan.change.name, None)

    def _begin(self, plan: AdapterPlan) -> AdapterPlan:
        self._changing[plan.change.name] = plan
        return plan

    # --- pending changes ----------------------------------------------------------------------------------------------

    def due(self, backend: str, now: float) -> list[AdapterChange]:
        """Returns the changes to send to a backend: missing in its last model list, and not paused after a failure."""
        pool = self._catalogue.pool_of(backend)
        due: list[AdapterChange] = []
        for name in list(self._records):
            record = self._record(name)
            if record is None or record.pool != pool or name in self._changing:
                continue
            if record.joining is not None:
                record.wanted.setdefault(backend, record.joining)
            change = record.wanted.get(backend)
            if change is None:
                continue
            if self.is_met(change, backend):
                self._complete(record, backend, change)
            elif now >= record.failures.get(backend, (0, now))[1]:
                due.append(change)
        return due

    def is_met(self, change: AdapterChange, backend: str) -> bool:
        """Returns whether the last model list of the backend shows the effect of `change`.

        A model list does not show new weights, so for a change in place the backend must also have confirmed it.
        """
        if change.path is None:
            return change.name not in self._listed(backend)
        record = self._record(change.name)
        taken = record is not None and record.confirmed.get(backend) is change
        return self._has_loaded(change.name, backend, change.path) and (taken or not change.in_place)

    def replied(self, change: AdapterChange, reply: Reply, now: float) -> None:
        """Records the reply of a backend to a change. After a failure, the change becomes due again with a backoff."""
        record = self._record(change.name)
        if record is None or record.wanted.get(reply.backend) is not change:
            return
        if reply.taken:
            record.confirmed[reply.backend] = change
            self._complete(record, reply.backend, change)
            return
        failures = record.failures.get(reply.backend, (0, 0.0))[0] + 1
        pause_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures - 1, 16))
        record.failures[reply.backend] = failures, now + pause_s

    def _complete(self, record: _Record, backend: str, change: AdapterChange) -> None:
        record.failures.pop(backend, None)
        if change.path is None:
            del record.wanted[backend]
            record.confirmed.pop(backend, None)
            self._tidy(change.name)

    def _tidy(self, name: str) -> None:
        """Deletes a record that concerns no backend any more, and updates `Catalogue.promised`."""
        record = self._record(name)
        if record is not None and not record.wanted and record.joining is None:
            del self._records[name]
        self._catalogue.promised = frozenset(n for n, r in self._records.items() if r.load is not None)

    def forget(self, backend: str) -> None:
        self._cards.pop(backend, None)
        for name, record in list(self._records.items()):
            record.wanted.pop(backend, None)
            record.confirmed.pop(backend, None)
            record.failures.pop(backend, None)
            self._tidy(name)

    # --- inspection ---------------------------------------------------------------------------------------------------

    def states(self) -> tuple[list[AdapterState], int]:
        """Returns the records sorted by name, and the number of records left out."""
        shown: list[AdapterState] = []
        left = SHOWN_MAX
        for name in sorted(self._records):
            left -= len(self._records[name].wanted)
            if left < 0:
                break
            shown.append(self._state(name, self._records[name]))
        return shown, len(self._records) - len(shown)

    def _state(self, name: str, record: _Record) -> AdapterState:
        standings = tuple(
            AdapterOnBackend(
                backend,
                change.kind,
                self.is_met(change, backend) and not self._is_down(backend),
                record.failures.get(backend, (0, 0.0))[0],
            )
            for backend, change in sorted(record.wanted.items())
        )
        load = record.load
        return AdapterState(name, record.pool, load.path if load else None, record.joining is not None, standings)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _record(self, name: str) -> _Record | None:
        record = self._records.get(name)
        if record is not None:
            # The name of a pool changes with the listings of its backends.
            record.pool = self._catalogue.pool_named(record.pool)
        return record

    def _pool_for(self, name: str, model: str | None) -> str:
        """Returns the pool of `model`; without a model, the pool of the adapter or the only pool. Raises Refused."""
        if model is not None:
            target = self._catalogue.served.get(model) or self._catalogue.targets.get(model)
            if target is None or target.adapter is not None:
                message = f"`{model[:200]}` is no base model served here; there are: "
                raise Refused(Outcome.UNKNOWN_MODEL, message + (", ".join(self._catalogue.pools[:20]) or "none") + ".")
            return target.pool
        if name in self._records:
            return self._catalogue.pool_named(self._records[name].pool)
        target = self._catalogue.served.get(name)
        if target is not None and target.adapter is not None:
            return target.pool
        pools = self._catalogue.pools
        if len(pools) == 1:
            return pools[0]
        if not pools:
            message = "No backend has answered so far. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_UNKNOWN_S)
        message = "Several base models are served: set `model` to the base model of this adapter, one of "
        raise Refused(Outcome.BAD_REQUEST, message + ", ".join(pools[:20]) + ".")

    def _check_name(self, name: str, pool: str) -> None:
        """Raises Refused if requests for `name` would not, or not always, reach the adapter."""
        target, record = self._catalogue.served.get(name), self._record(name)
        if self._catalogue.aliases.get(name, name) != name:
            raise Refused(Outcome.BAD_REQUEST, f"The name '{name}' is an alias in the proxy's configuration.")
        if target is not None and target.adapter is None:
            raise Refused(Outcome.BAD_REQUEST, f"The lora adapter '{name}' conflicts with a served base model.")
        other = record.pool if record is not None else target.pool if target is not None else pool
        if other != pool:
            raise Refused(Outcome.BAD_REQUEST, f"The name '{name}' is the name of an adapter of `{other}` already.")

    def _make_room(self, name: str) -> None:
        if name in self._records or len(self._records) + len(self._changing) < ADAPTERS_MAX:
            return
        # A record with only unloads may wait for a backend that never returns.
        leaving = next((n for n, r in self._records.items() if r.load is None), None)
        if leaving is None:
            message = f"{ADAPTERS_MAX} adapters are loaded through the proxy already: unload one first."
            raise Refused(Outcome.BAD_REQUEST, message)
        del self._records[leaving]

    def _members(self, pool: str) -> list[str]:
        return [backend for backend in self._pools.backends if self._catalogue.pool_of(backend) == pool]

    def _is_down(self, backend: str) -> bool:
        known = self._pools.backends.get(backend)
        return known is None or known.health.down

    def _adapter_count(self, backend: str) -> int:
        """Returns the number of adapters on a backend after the changes in progress."""
        changes = [record.wanted[backend] for record in self._records.values() if backend in record.wanted]
        changes += [plan.change for plan in self._changing.values() if backend in plan.backends]
        names = {change.name for change in changes if change.path is not None}
        return len(names | self._listed(backend).keys())

    def _listed(self, backend: str) -> Mapping[str, ModelCard]:
        """Returns the adapters in a backend's last model list, by name. The result is cached until the next list."""
        known_backend = self._pools.backends.get(backend)
        listing = known_backend.listing if known_backend is not None else None
        if listing is None:
            return {}
        known = self._cards.get(backend)
        if known is None or known[0] is not listing:
            known = listing, {card.name: card for card in listing.cards if card.parent is not None}
            self._cards[backend] = known
        return known[1]

    def _has_loaded(self, name: str, backend: str, path: str) -> bool:
        card = self._listed(backend).get(name)
        # vLLM lists the path of an adapter as its root. If a server lists no root, the name alone decides.
        return card is not None and card.fields.get("root", path) == path
