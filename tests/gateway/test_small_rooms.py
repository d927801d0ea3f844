"""The rooms of the gateway that are pure and small: routes, errors, headers, stored responses."""

from __future__ import annotations

import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.config import Config
from llmproxy.core.domain import Outcome
from llmproxy.fleet.adapter_keeper import PATHS
from llmproxy.gateway.http.errors import STATUS, Failure, error_body, error_event, nothing_at
from llmproxy.gateway.http.headers import PRIVILEGED, to_backend, to_client
from llmproxy.gateway.http.routes import LOAD_ADAPTER, SCHEDULED, UNLOAD_ADAPTER, Dialect, dialect_of
from llmproxy.gateway.proxying.rules import Rulebook, Rules
from llmproxy.gateway.proxying.stored import IDS_MAX, StoredResponses
from llmproxy.gateway.request.auth import Tenant
from llmproxy.gateway.request.body import Bodies, HeldBody
from llmproxy.upstream.port import Exchange
from tests import ROOT
from tests.dispatching import dispatcher

MANAGEMENT = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/sleep", "/wake_up", "/pause", "/resume",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc", "/server_info",
    "/update_weights", "/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/abort_requests", "/inference/v1/abort_requests",
    "/release_kv_cache_memory", "/start_profile", "/stop_profile", "/invocations", "/load",
    "/shutdown_weight_transfer_engine", "/start_draft_weight_update", "/update_weight_version", "/weight_info",
    "/weight_checker", "/get_world_size", "/is_sleeping", "/is_paused", "/kv_event_sources", "/adapters/{adapter_name}",
    "/init_weights_update_group", "/fault_tolerance",
)  # fmt: skip


class NoUpstream:
    async def open(self, *_: object) -> Exchange:
        raise AssertionError("nothing should be sent")


def config(**fields: object) -> Config:
    return Config.model_validate({"backends": ["http://gpu-0:8000"], **fields})


@pytest.mark.parametrize("path", MANAGEMENT)
def test_management_routes_do_not_exist(path: str) -> None:
    assert path not in SCHEDULED


def test_adapters_are_changed_at_vllms_own_paths() -> None:
    assert set(PATHS.values()) == {LOAD_ADAPTER, UNLOAD_ADAPTER}


def test_the_page_on_routes_lists_exactly_those_of_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "routes.md").read_text()
    rows = re.findall(r"^\| `(/\S+)` \| (OpenAI|Anthropic) \| ([a-z ]+) \|$", page, re.MULTILINE)
    listed = {path: (dialect, work) for path, dialect, work in rows}
    table = {p: ("Anthropic" if r.dialect is Dialect.ANTHROPIC else "OpenAI", r.work) for p, r in SCHEDULED.items()}
    assert listed == table


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/models", "/v1/models"),
        ("/v1/classify", "/classify"),
    ],
)
def test_a_path_with_one_v1_too_few_or_too_many_is_told_which_is_meant(asked: str, meant: str) -> None:
    assert nothing_at(asked).message == f"There is nothing at {asked}; {meant} is what you may mean."


@pytest.mark.parametrize("asked", ["/", "/v1", "/v1/metrics", "/v1/debug/queue", "/v1/chat", "/sleep"])
def test_other_paths_are_told_of_no_path(asked: str) -> None:
    assert nothing_at(asked).message == f"There is nothing at {asked}."


def test_every_outcome_but_success_has_a_status() -> None:
    assert set(Outcome) - set(STATUS) == {Outcome.COMPLETED}


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_speak_the_dialect_of_their_endpoint() -> None:
    openai = orjson.loads(error_body(dialect_of("/v1/chat/completions"), 404, "no such model", "model"))
    assert openai == {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}
    anthropic = orjson.loads(error_body(dialect_of("/v1/messages"), 404, "no such model"))
    assert anthropic == {"type": "error", "error": {"type": "not_found_error", "message": "no such model"}}


@pytest.mark.parametrize("dialect", list(Dialect))
def test_an_error_event_is_one_whole_event_with_json_data(dialect: Dialect) -> None:
    event = error_event(dialect, 'broke\n\n"here"')
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    data = event.split(b"data: ", 1)[1]
    assert "broke" in orjson.dumps(orjson.loads(data)).decode()


def test_retry_after_is_a_whole_number_of_seconds_and_never_zero() -> None:
    assert Failure(Outcome.EXPIRED, "late", retry_after_s=0.2).headers == {"Retry-After": "1"}
    assert Failure(Outcome.EXPIRED, "late", retry_after_s=2.1).headers == {"Retry-After": "3"}
    assert Failure(Outcome.BAD_REQUEST, "bad").headers == {}


# --- headers ----------------------------------------------------------------------------------------------------------

SENT = [
    ("Host", "proxy:8080"),
    ("Content-Length", "12"),
    ("Connection", "keep-alive, X-Hop"),
    ("X-Hop", "1"),
    ("Transfer-Encoding", "chunked"),
    ("TE", "trailers"),
    ("Authorization", "Bearer client"),
    ("X-Request-Id", "theirs"),
    ("X-Vllm-Priority", "-5"),
    ("X-Data-Parallel-Rank", "1"),
    ("X-Prefiller-Host-Port", "10.0.0.9:1"),
    ("X-Encoder-Hosts-Ports", "10.0.0.9:1"),
    ("X-Data-Parallel-Host-Port", "10.0.0.9:1"),
    ("x-llm-d-inference-objective", "critical"),
    ("X-Gateway-Inference-Fairness-ID", "me"),
    ("X-LLM-D-SLO-TTFT-MS", "1"),
    ("x-slo-tpot-ms", "1"),
    ("X-Session-ID", "s1"),
    ("Accept", "text/event-stream"),
    ("Accept-Encoding", "gzip, br"),
]


def test_only_end_to_end_fields_reach_the_backend() -> None:
    kept = to_backend(SENT, request_id="ours", withheld=PRIVILEGED, authorization=None, keep_credentials=True)
    assert kept == [
        ("Authorization", "Bearer client"),
        ("X-Session-ID", "s1"),
        ("Accept", "text/event-stream"),
        ("x-request-id", "ours"),
        ("accept-encoding", "identity"),
    ]


def test_a_trusted_peer_keeps_its_privileges() -> None:
    kept = dict(to_backend(SENT, request_id="ours", withheld=frozenset(), authorization=None, keep_credentials=True))
    assert kept["X-Vllm-Priority"] == "-5"
    assert kept["x-llm-d-inference-objective"] == "critical"
    assert kept["X-LLM-D-SLO-TTFT-MS"] == "1"


def test_the_backends_key_replaces_the_clients() -> None:
    kept = to_backend(
        SENT, request_id="ours", withheld=PRIVILEGED, authorization="Bearer engine", keep_credentials=True
    )
    assert [value for name, value in kept if name.lower() == "authorization"] == ["Bearer engine"]


def test_a_key_that_opened_the_proxy_goes_no_further() -> None:
    kept = to_backend(SENT, request_id="ours", withheld=PRIVILEGED, authorization=None, keep_credentials=False)
    assert not [name for name, _ in kept if name.lower() == "authorization"]


def test_answers_keep_their_fields_but_not_the_hops() -> None:
    fields = [
        ("date", "now"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("connection", "close, x-private"),
        ("x-private", "1"),
        ("transfer-encoding", "chunked"),
        ("x-llmproxy-backend", "forged"),
        ("server", "uvicorn"),
        ("content-length", "5"),
    ]
    kept = [("date", "now"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("content-length", "5")]
    assert to_client(fields) == [*kept, ("Server", "llmproxy")]


# --- stored responses -------------------------------------------------------------------------------------------------


def stored_responses() -> StoredResponses:
    return StoredResponses(Rulebook(Rules.of(config(), NoUpstream())), {}, NoUpstream(), dispatcher())


def test_the_maker_of_a_response_is_remembered_within_a_bound() -> None:
    stored = stored_responses()
    stored.remember(b'event: response.created\ndata: {"response":{"id":"resp_0","created_at":1', "gpu-0")
    stored.remember(b'{"error":{}}', "gpu-0")
    assert stored.backend_of("resp_0") == "gpu-0"
    for i in range(1, IDS_MAX + 1):
        stored.remember(f'{{"id":"resp_{i}"}}'.encode(), "gpu-1")
    assert stored.backend_of("resp_0") is None
    assert stored.backend_of(f"resp_{IDS_MAX}") == "gpu-1"
    assert len(stored.made_by) == IDS_MAX


def test_who_makes_many_responses_forgets_its_own() -> None:
    stored = stored_responses()
    acme, zeta = Tenant(name="acme"), Tenant(name="zeta")
    stored.remember(b'{"id":"resp_acme"}', "gpu-0", acme)
    for i in range(IDS_MAX + 5):
        stored.remember(f'{{"id":"resp_{i}"}}'.encode(), "gpu-1", zeta)
    assert (len(stored.made_by), stored.backend_of("resp_acme", acme)) == (IDS_MAX, "gpu-0")
    assert [stored.backend_of(f"resp_{i}", zeta) for i in (5, 6)] == [None, "gpu-1"]


CREATED = b'event: response.created\ndata: {"response":{"id":"resp_0","created_at":1}}\n\n'


@pytest.mark.parametrize(
    "head",
    [
        b'{"id":"resp_0","object":"response","instructions":"x","metadata":{"id":"resp_1"}}',
        b' { "object" : "response", "created_at": 17, "done": null, "id" : "resp_0" }',
        CREATED,
        b": keep-alive\n\n: keep-alive\r\n\r\nretry: 5\n" + CREATED,
        b'data: {"type":"response.created","sequence_number":0,"response":{"object":"response","id":"resp_0","a',
    ],
)
def test_the_id_of_a_response_is_found(head: bytes) -> None:
    stored = stored_responses()
    stored.remember(head, "gpu-0")
    assert list(stored.made_by) == ["resp_0"]


@pytest.mark.parametrize(
    "head",
    [
        # What a client says in its instructions or its metadata comes back in the answer.
        b'{"metadata":{"id":"resp_1"},"id":"resp_0"}',
        b'{"instructions":"\\"id\\":\\"resp_1\\"","id":"resp_0"}',
        b'{"instructions":"say \\",\\"id\\":\\"resp_1\\"","object":"response"}',
        b'{"output":[{"id":"resp_1"}],"id":"resp_0"}',
        b'{"id":"msg_0","x":{"id":"resp_1"}}',
        b'{"id":7,"id":"resp_1"}',
        b'event: response.created\ndata: {"metadata":{"id":"resp_1"},"response":{"id":"resp_0"}}',
        b'event: response.created\ndata: {"response":{"metadata":{"id":"resp_1"}}}',
        b'event: response.created\ndata: {"id":"resp_1"}\n\ndata: {"response":{"id":"resp_1"}}\n\n',
        b'data: {"response":{"instructions":"a"}}\n\ndata: {"response":{"id":"resp_1"}}\n\n',
        b'{"error":{"message":"{\\"id\\":\\"resp_1\\"}"}}',
        b'{"id":"resp_' + b"1" * 5000,
        b'{"a":1' + b" " * 4000,
        b"event: " * 500,
    ],
)
def test_an_id_elsewhere_in_an_answer_is_not_that_of_the_response(head: bytes) -> None:
    stored = stored_responses()
    stored.remember(head, "gpu-0")
    assert list(stored.made_by) == []


def test_a_response_exists_for_the_tenant_that_made_it_alone() -> None:
    stored = stored_responses()
    acme, zeta = Tenant(name="acme"), Tenant(name="zeta")
    stored.remember(b'{"id":"resp_0"}', "gpu-0", acme)
    assert stored.backend_of("resp_0", acme) == "gpu-0"
    assert stored.backend_of("resp_0", zeta) is stored.backend_of("resp_0") is None
    told: list[tuple[str, str, str]] = []
    stored.on_made = lambda *made: told.append(made)
    stored.remember(b'{"id":"resp_0"}', "gpu-1", zeta)
    assert (told, dict(stored.made_by)) == ([], {"resp_0": ("gpu-0", "acme")})
    stored.remember(b'{"id":"resp_0"}', "gpu-1", acme)
    assert stored.backend_of("resp_0", acme) == "gpu-1", "made once more by its owner"
    assert stored.note("resp_0", "gpu-2", "zeta", settled=True), "as it was decided where all workers' are known"
    assert (stored.backend_of("resp_0", acme), stored.backend_of("resp_0", zeta)) == (None, "gpu-2")


# --- bodies that are held ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["came", "begins", "grows", "arrived", "over"]), st.integers(0, 60))))
def test_no_more_is_held_than_may_be_and_all_of_it_is_given_back(steps: list[tuple[str, int]]) -> None:
    bodies = Bodies()
    bodies.limit(100, 40)
    held: list[HeldBody] = []
    for step, size in steps:
        one = held[size % len(held)] if held else HeldBody(bodies)
        if step in ("came", "begins"):
            held.append(HeldBody(bodies))
            if step == "begins":
                held[-1].arriving(lambda: None)
            else:
                held[-1].came(size)
        elif step == "grows":
            was, largest = one.cut is not None, max(each.size for each in held) if held else 0
            refused_before, held_before = {each for each in held if each.refused}, bodies.held_bytes
            grew = one.grown(size)
            assert grew is was or held_before + size > 87, "there was room"
            for each in {each for each in held if each.refused} - refused_before:
                assert each.size == 0, "what it held is free"
            assert one.size <= largest + size
        elif step == "arrived":
            one.arrived()
        else:
            one.release()
        assert bodies.held_bytes == sum(each.size for each in held) <= 100
        assert bodies.arriving_bytes == sum(each.size for each in held if each.cut is not None)
    for each in held:
        each.release()
    assert (bodies.held_bytes, bodies.arriving_bytes) == (0, 0)


def test_one_of_the_largest_that_arrive_is_refused_and_nobody_in_vain() -> None:
    bodies = Bodies()
    bodies.limit(1_600, 100)
    cut: list[int] = []
    arriving = [HeldBody(bodies) for _ in range(3)]
    for number, body in enumerate(arriving):
        body.arriving(lambda number=number: cut.append(number))  # type: ignore[misc]
        assert body.grown((100, 900, 300)[number])
    assert arriving[0].grown(150)
    assert (cut, arriving[1].refused) == ([1], True)
    assert HeldBody(bodies).came(900)
    assert cut == [1], "it fits beside those that arrive"
    assert not arriving[2].grown(300), "it would not fit without the others either"
    assert cut == [1]
    assert bodies.held_bytes == 900 + 250
