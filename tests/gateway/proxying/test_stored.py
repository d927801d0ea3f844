"""The backend that made a stored response is remembered, within limits and for its tenant only."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import ClassVar
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.config import Config
from llmproxy.gateway.proxying import stored as stored_module
from llmproxy.gateway.proxying.rules import Rulebook, Rules
from llmproxy.gateway.proxying.stored import IDS_MAX, StoredResponses
from llmproxy.gateway.request.auth import Tenant
from llmproxy.upstream.port import Exchange
from tests.counted import calls_in
from tests.dispatching import dispatcher


class NoUpstream:
    async def open(self, *_: object) -> Exchange:
        raise AssertionError("nothing should be sent")


def config(**fields: object) -> Config:
    return Config.model_validate({"backends": ["http://gpu-0:8000"], **fields})


def stored_responses() -> StoredResponses:
    return StoredResponses(Rulebook(Rules.build(config(), NoUpstream())), {}, NoUpstream(), dispatcher())


def test_backends_of_responses_are_remembered_up_to_a_limit() -> None:
    stored = stored_responses()
    stored.remember(b'event: response.created\ndata: {"response":{"id":"resp_0","created_at":1', "gpu-0")
    stored.remember(b'{"error":{}}', "gpu-0")
    assert stored.backend_for("resp_0") == "gpu-0"
    for i in range(1, IDS_MAX + 1):
        stored.remember(f'{{"id":"resp_{i}"}}'.encode(), "gpu-1")
    assert stored.backend_for("resp_0") is None
    assert stored.backend_for(f"resp_{IDS_MAX}") == "gpu-1"
    assert len(stored.made_by) == IDS_MAX


def test_a_tenant_with_many_responses_forgets_only_its_own() -> None:
    stored = stored_responses()
    acme, zeta = Tenant(name="acme"), Tenant(name="zeta")
    stored.remember(b'{"id":"resp_acme"}', "gpu-0", acme)
    for i in range(IDS_MAX + 5):
        stored.remember(f'{{"id":"resp_{i}"}}'.encode(), "gpu-1", zeta)
    assert (len(stored.made_by), stored.backend_for("resp_acme", acme)) == (IDS_MAX, "gpu-0")
    assert [stored.backend_for(f"resp_{i}", zeta) for i in (5, 6)] == [None, "gpu-1"]


class Counted(OrderedDict[str, None]):
    """The ids of a tenant. `len` is a call of Python, which is counted."""

    all: ClassVar[list[ref[Counted]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.all.append(ref(self))

    def __len__(self) -> int:
        return super().__len__()


def test_the_oldest_id_of_the_largest_tenant_is_forgotten_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "IDS_MAX", 100)
    monkeypatch.setattr(stored_module, "OrderedDict", Counted)

    def calls_with(tenants: int) -> int:
        stored, Counted.all = stored_responses(), []
        for i in range(150):
            stored.note(f"resp_{i}", "gpu-0", f"tenant-{i % tenants}")
        assert len([one for one in Counted.all if one() is not None]) == min(tenants, 100), "no tenant without ids"
        return calls_in(lambda: stored.note("resp_new", "gpu-0", f"tenant-{149 % tenants}"))

    calls = [calls_with(tenants) for tenants in (2, 90, 150)]
    assert max(calls) < min(calls) + 5, "of a few cases, not of all tenants"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.booleans())))
def test_the_largest_tenant_always_pays(notes: list[tuple[int, int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_module, "IDS_MAX", 6)
        stored = stored_responses()
        for number, tenant, authoritative in notes:
            sizes = Counter(owner for _, owner in stored.made_by.values())
            before = set(stored.made_by)
            noted = stored.note(f"resp_{number}", "gpu-0", f"t{tenant}", authoritative=authoritative)
            sizes[f"t{tenant}"] += noted and f"resp_{number}" not in before
            after = Counter(owner for _, owner in stored.made_by.values())
            if before - set(stored.made_by):
                assert after.total() == 6
                assert max(sizes.values()) - 1 <= max(after.values()) <= max(sizes.values())
                assert [size - after[name] for name, size in sizes.items() if size != after[name]] == [1]
                assert all(sizes[name] == max(sizes.values()) for name in sizes if sizes[name] != after[name])


CREATED = b'event: response.created\ndata: {"response":{"id":"resp_0","created_at":1}}\n\n'


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b'{"id":"resp_0","object":"response","instructions":"x","metadata":{"id":"resp_1"}}', True),
        (b' { "object" : "response", "created_at": 17, "done": null, "id" : "resp_0" }', True),
        (CREATED, True),
        (b": keep-alive\n\n: keep-alive\r\n\r\nretry: 5\n" + CREATED, True),
        (
            b'data: {"type":"response.created","sequence_number":0,"response":{"object":"response","id":"resp_0","a',
            True,
        ),
        # The answer repeats instructions and metadata of the client.
        (b'{"metadata":{"id":"resp_1"},"id":"resp_0"}', False),
        (b'{"instructions":"\\"id\\":\\"resp_1\\"","id":"resp_0"}', False),
        (b'{"instructions":"say \\",\\"id\\":\\"resp_1\\"","object":"response"}', False),
        (b'{"output":[{"id":"resp_1"}],"id":"resp_0"}', False),
        (b'{"id":"msg_0","x":{"id":"resp_1"}}', False),
        (b'{"id":7,"id":"resp_1"}', False),
        (b'event: response.created\ndata: {"metadata":{"id":"resp_1"},"response":{"id":"resp_0"}}', False),
        (b'event: response.created\ndata: {"response":{"metadata":{"id":"resp_1"}}}', False),
        (b'event: response.created\ndata: {"id":"resp_1"}\n\ndata: {"response":{"id":"resp_1"}}\n\n', False),
        (b'data: {"response":{"instructions":"a"}}\n\ndata: {"response":{"id":"resp_1"}}\n\n', False),
        (b'{"error":{"message":"{\\"id\\":\\"resp_1\\"}"}}', False),
        (b'{"id":"resp_' + b"1" * 5000, False),
        (b'{"a":1' + b" " * 4000, False),
        (b"event: " * 500, False),
    ],
)
def test_only_an_id_at_the_top_of_an_answer_is_remembered(head: bytes, found: bool) -> None:
    stored = stored_responses()
    stored.remember(head, "gpu-0")
    assert list(stored.made_by) == (["resp_0"] if found else [])


def test_a_response_exists_only_for_its_tenant() -> None:
    stored = stored_responses()
    acme, zeta = Tenant(name="acme"), Tenant(name="zeta")
    stored.remember(b'{"id":"resp_0"}', "gpu-0", acme)
    assert stored.backend_for("resp_0", acme) == "gpu-0"
    assert stored.backend_for("resp_0", zeta) is stored.backend_for("resp_0") is None
    notified: list[tuple[str, str, str]] = []
    stored.on_made = lambda *made: notified.append(made)
    stored.remember(b'{"id":"resp_0"}', "gpu-1", zeta)
    assert (notified, dict(stored.made_by)) == ([], {"resp_0": ("gpu-0", "acme")})
    stored.remember(b'{"id":"resp_0"}', "gpu-1", acme)
    assert stored.backend_for("resp_0", acme) == "gpu-1", "made once more by its owner"
    assert stored.note("resp_0", "gpu-2", "zeta", authoritative=True), "as it was decided where all workers' are known"
    assert (stored.backend_for("resp_0", acme), stored.backend_for("resp_0", zeta)) == (None, "gpu-2")
