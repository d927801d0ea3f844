"""Classification: band, flow, weight, objective, limits and time to wait, and whose headers count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from msgspec import structs

from llmproxy.config import Config, hash_of
from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Slo
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.headers import PRIVILEGED
from llmproxy.gateway.request.auth import NO_TENANT, Keys, Tenant
from llmproxy.gateway.request.identity import (
    FLOW_CHARS_MAX,
    TTL_HEADER,
    Identity,
    parse_duration_s,
    request_id,
)
from llmproxy.observe.exit import RequestExit
from tests import ROOT
from tests.counted import calls_in
from tests.exits import exit_of

OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS = "x-gateway-inference-fairness-id"
TTL = "x-llm-d-inference-ttl"
RECORD = exit_of(request_id="r", method="POST", path="/")


def config(**fields: object) -> Config:
    return Config.model_validate({"backends": ["http://gpu-0:8000"], **fields})


def classified(
    identity: Identity,
    headers: Mapping[str, str],
    trusted: bool,
    requested: str,
    target: str,
    tenant: Tenant = NO_TENANT,
) -> RequestExit:
    """The record of a request after its classification."""
    record = structs.replace(RECORD)
    identity.classify(record, headers, trusted, requested, target, tenant)
    return record


def of_acme(tenant: dict[str, Any] | None = None, **fields: Any) -> tuple[Identity, Tenant]:
    """The identity of a configuration with one tenant, and that tenant."""
    settings = config(tenants=[{"name": "acme", "keys": [hash_of("k")]} | (tenant or {})], **fields)
    return Identity(settings), Keys(settings).check({"x-api-key": "k"})


# --- times and ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5s", 1.5),
        ("300ms", 0.3),
        ("1m30s", 90.0),
        ("2h", 7200.0),
        ("0", 0.0),
        ("5us", 5e-6),
        ("5µs", 5e-6),
        (".5s", 0.5),
    ],
)
def test_durations_in_gos_notation(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "5", "-1s", "1 s", "s", "1s2", "1x", "1s junk", "--1s", "1..5s", "٣s", "9" * 2000, "9" * 2000 + "s"]
)
def test_other_texts_are_no_duration(text: str) -> None:
    assert parse_duration_s(text) is None


def test_request_ids_are_taken_if_they_fit_a_log_line() -> None:
    assert request_id({}) is None
    assert request_id({"x-request-id": "abc-1"}) == "abc-1"
    for bad in ("", "a b", "x" * 257, "caf\u00e9"):
        assert request_id({"x-request-id": bad}) is None


def test_the_ttl_header_can_only_shorten() -> None:
    identity = Identity(config(queue={"max_wait_s": 10}))
    assert classified(identity, {TTL: "300ms"}, False, "m", "m").max_wait_s == pytest.approx(0.3)
    assert classified(identity, {TTL: "1h"}, False, "m", "m").max_wait_s == 10
    for text in ("soon", "5", "-1s", "0s", "", "1d"):
        with pytest.raises(Failure) as caught:
            classified(identity, {TTL: text}, False, "m", "m")
        assert (caught.value.status, caught.value.param) == (400, TTL_HEADER)


@pytest.mark.parametrize("header", sorted({TTL_HEADER, *PRIVILEGED}))
def test_every_header_for_classification_is_documented(header: str) -> None:
    docs = ROOT / "docs"
    assert f"`{header}`" in (docs / "how-to" / "tenants.md").read_text()


def test_bands_may_have_different_times_to_wait() -> None:
    identity = Identity(config(queue={"max_wait_s": 10, "band_max_wait_s": {"sheddable": 600, "critical": 2}}))

    def max_wait_s(band: str, **headers: str) -> float | None:
        return classified(identity, {OBJECTIVE: band} | headers, True, "m", "m").max_wait_s

    assert [max_wait_s(band) for band in ("critical", "default", "sheddable")] == [2, 10, 600]
    assert [max_wait_s(band, **{TTL: "60s"}) for band in ("critical", "default", "sheddable")] == [2, 10, 60]


def test_time_to_wait_follows_the_final_band() -> None:
    identity, acme = of_acme({"band_max": "sheddable"}, queue={"band_max_wait_s": {"sheddable": 600}})
    assert classified(identity, {OBJECTIVE: "critical"}, True, "m", "m", acme).max_wait_s == 600


# --- trust ------------------------------------------------------------------------------------------------------------


def at(address: str) -> Client:
    """A client that connects directly from this address."""
    return Client(address, certain=True)


def test_trust_is_by_network() -> None:
    loopback = Identity(config())
    for address in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        assert loopback.trusts(at(address))
    assert not loopback.trusts(at("10.0.0.7"))
    assert not loopback.trusts(at(""))
    assert not Identity(config(trust_headers="all")).trusts(at("")), "whoever has no address any more is in no network"
    networks = Identity(config(trust_headers=["10.0.0.0/8"]))
    assert networks.trusts(at("10.0.0.7"))
    assert not networks.trusts(at("127.0.0.1"))
    assert not Identity(config(trust_headers="none")).trusts(at("127.0.0.1"))


@pytest.mark.parametrize("trust", ["auto", "loopback", ["10.0.0.0/8", "127.0.0.1"]])
def test_no_address_counts_if_the_request_may_be_forwarded(trust: object) -> None:
    identity = Identity(config(trust_headers=trust))
    for address in ("127.0.0.1", "10.0.0.7"):
        assert not identity.trusts(Client(address, certain=False))
        assert not identity.trusts(Client(address, certain=False, proxied=True))
    assert Identity(config(trust_headers="all")).trusts(Client("127.0.0.1", certain=False)), "then no address matters"


def test_loopback_counts_for_nothing_where_clients_need_a_key() -> None:
    identity, acme = of_acme()
    assert not identity.trusts(at("127.0.0.1"), acme)
    assert not Identity(config(api_keys=["k"])).trusts(at("127.0.0.1"))
    identity, acme = of_acme(trust_headers="loopback")
    assert identity.trusts(at("127.0.0.1"), acme)


def test_trusted_proxies_may_set_the_headers() -> None:
    identity = Identity(config(trust_proxy_headers=True, trust_headers="none"))
    assert identity.trusts(Client("8.8.8.8", certain=False, proxied=True))
    assert not identity.trusts(at("8.8.8.8"))


def test_a_tenant_can_be_trusted_from_any_network() -> None:
    identity, trusted = of_acme({"trusted": True}, trust_headers="none")
    assert identity.trusts(at("8.8.8.8"), trusted)
    assert not identity.trusts(at("8.8.8.8")), "trust in a tenant is no trust in the address"
    identity, plain = of_acme(trust_headers=["10.0.0.0/8"])
    assert not identity.trusts(at("8.8.8.8"), plain)
    assert identity.trusts(at("10.0.0.7"), plain)


def test_only_a_shorter_ttl_counts_from_untrusted_clients() -> None:
    identity = Identity(config(scheduling={"flow": "header:x-team"}))
    headers = {
        OBJECTIVE: "nonsense",
        FAIRNESS: "me",
        "x-team": "me",
        "x-slo-ttft-ms": "nonsense",
        "x-llm-d-slo-tpot-ms": "-1",
        TTL: "5s",
    }
    assert classified(identity, headers, False, "m", "m") == structs.replace(
        RECORD, level=DEFAULT, flow="m", max_wait_s=5.0
    )


# --- bands ------------------------------------------------------------------------------------------------------------


def test_a_trusted_header_overrides_the_model() -> None:
    identity = Identity(
        config(
            models=[{"name": "fast", "target": "base", "criticality": "critical"}],
            objectives=[{"name": "batch", "criticality": "sheddable"}],
        )
    )
    headers = {OBJECTIVE: "batch", FAIRNESS: "team-a"}
    trusted = classified(identity, headers, True, "fast", "base")
    assert (trusted.level, trusted.flow) == (SHEDDABLE, "team-a")
    untrusted = classified(identity, headers, False, "fast", "base")
    assert untrusted.flow == "fast"
    assert classified(identity, {}, True, "base", "base").level == DEFAULT


def test_an_alias_has_its_targets_band_unless_it_has_its_own() -> None:
    models = [
        {"name": "base", "criticality": "critical"},
        {"name": "alias", "target": "base"},
        {"name": "slow", "target": "base", "criticality": "sheddable"},
    ]
    identity = Identity(config(models=models))
    assert classified(identity, {}, False, "alias", "base").level == CRITICAL
    assert classified(identity, {}, False, "slow", "base").level == SHEDDABLE


@pytest.mark.parametrize(
    ("headers", "tenant", "band"),
    [
        ({}, {}, SHEDDABLE),
        ({}, {"criticality": 50}, 50),
        ({}, {"criticality": "default"}, DEFAULT),
        ({OBJECTIVE: "critical"}, {"criticality": 50}, 50),
        ({OBJECTIVE: "critical"}, {"criticality": 50, "trusted": True}, CRITICAL),
        ({OBJECTIVE: "critical"}, {"criticality": 50, "band_max": "critical"}, CRITICAL),
        ({OBJECTIVE: "critical"}, {}, SHEDDABLE),
        ({OBJECTIVE: "critical"}, {"trusted": True}, CRITICAL),
        ({OBJECTIVE: "default"}, {"criticality": 50}, DEFAULT),
        ({OBJECTIVE: "quick"}, {"criticality": 50}, 50),
        ({OBJECTIVE: "quick"}, {}, SHEDDABLE),
        ({OBJECTIVE: "critical"}, {"band_max": 70}, 70),
        ({OBJECTIVE: "critical"}, {"band_max": 70, "trusted": True}, 70),
        ({OBJECTIVE: "sheddable"}, {"band_max": 70}, SHEDDABLE),
        ({}, {"band_max": -200}, -200),
        ({OBJECTIVE: "unheard of"}, {"criticality": 50}, DEFAULT),
        ({OBJECTIVE: "unheard of"}, {"band_max": -5}, -5),
    ],
)
def test_bands_come_from_header_tenant_model_up_to_band_max(
    headers: dict[str, str], tenant: dict[str, Any], band: int
) -> None:
    identity, acme = of_acme(
        tenant, models=[{"name": "m", "criticality": "sheddable"}], objectives=[{"name": "quick", "ttft_s": 0.5}]
    )
    assert classified(identity, headers, True, "m", "m", acme).level == band


@pytest.mark.parametrize(
    ("header", "tenant", "band"),
    [
        ("sheddable", {}, SHEDDABLE),
        ("late", {}, SHEDDABLE),
        ("critical", {}, DEFAULT),
        ("critical", {"band_max": "critical"}, DEFAULT),
        ("sheddable", {"criticality": 50, "band_max": "critical"}, SHEDDABLE),
        ("default", {"criticality": -200}, -200),
        ("quick", {}, DEFAULT),
        ("unheard of", {"criticality": 50}, 50),
    ],
)
def test_any_client_can_lower_its_band_and_gains_nothing(header: str, tenant: dict[str, Any], band: int) -> None:
    late = {"name": "late", "criticality": "sheddable", "ttft_s": 0.1}
    identity, acme = of_acme(tenant, objectives=[late, {"name": "quick", "ttft_s": 0.5}])
    found = classified(identity, {OBJECTIVE: header}, False, "m", "m", acme)
    assert (found.level, found.slo, found.unknown_objective) == (band, None, None)
    if not tenant:
        assert classified(identity, {OBJECTIVE: header}, False, "m", "m").level == band


def test_an_unknown_objective_is_the_default_band_and_reported() -> None:
    identity = Identity(config(objectives=[{"name": "batch", "criticality": "sheddable"}]))
    found = classified(identity, {OBJECTIVE: "bacth"}, True, "m", "m")
    assert (found.level, found.unknown_objective) == (DEFAULT, "bacth")
    assert classified(identity, {OBJECTIVE: "batch"}, True, "m", "m").unknown_objective is None
    assert classified(identity, {OBJECTIVE: "bacth"}, False, "m", "m").unknown_objective is None
    long = classified(identity, {OBJECTIVE: "x" * 9999}, True, "m", "m").unknown_objective
    assert long is not None
    assert len(long) == FLOW_CHARS_MAX


# --- flows and weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "flow"),
    [("model", "alias"), ("tenant", "acme"), ("tenant+model", "acme+alias"), ("header:x-team", "blue")],
)
def test_flows_are_named_as_configured(kind: str, flow: str) -> None:
    identity, acme = of_acme(scheduling={"flow": kind})
    assert classified(identity, {"x-team": "blue"}, True, "alias", "base", acme).flow == flow
    assert classified(identity, {FAIRNESS: "green", "x-team": "blue"}, True, "alias", "base", acme).flow == "green"


@pytest.mark.parametrize(("kind", "flow"), [("tenant", ""), ("tenant+model", "+m"), ("header:x-team", "m")])
def test_the_flow_of_a_client_without_a_tenant_or_a_header(kind: str, flow: str) -> None:
    assert classified(Identity(config(scheduling={"flow": kind})), {}, True, "m", "m").flow == flow


def test_names_of_flows_are_bounded() -> None:
    identity = Identity(config())
    assert classified(identity, {FAIRNESS: "x" * 9999}, True, "m", "m").flow == "x" * FLOW_CHARS_MAX
    assert classified(identity, {}, False, "x" * 9999, "m").flow == "x" * FLOW_CHARS_MAX


def test_a_flow_has_its_own_weight_or_its_tenants() -> None:
    identity, acme = of_acme({"weight": 3}, scheduling={"weights": {"gold": 5}})
    assert classified(identity, {FAIRNESS: "gold"}, True, "m", "m", acme).weight == 5
    assert classified(identity, {}, True, "m", "m", acme).weight == 3
    assert classified(identity, {}, True, "m", "m").weight == 1


# --- objectives -------------------------------------------------------------------------------------------------------

PLACES = {
    "models": [{"name": "m", "ttft_s": 1.0, "tpot_s": 0.1}, {"name": "alias", "target": "m", "tpot_s": 0.15}],
    "objectives": [
        {"name": "quick", "ttft_s": 3.0, "criticality": "critical"},
        {"name": "smooth", "ttft_s": 4.0, "tpot_s": 0.4},
    ],
}


@pytest.mark.parametrize(
    ("headers", "tenant", "requested", "slo"),
    [
        ({}, {}, "other", None),
        ({}, {}, "m", Slo(1.0, 0.1)),
        ({}, {}, "alias", Slo(1.0, 0.15)),
        ({}, {"ttft_s": 2.0}, "m", Slo(2.0, 0.1)),
        ({}, {"ttft_s": 2.0, "tpot_s": 0.2}, "m", Slo(2.0, 0.2)),
        ({}, {"tpot_s": 0.2}, "other", Slo(None, 0.2)),
        ({OBJECTIVE: "quick"}, {"ttft_s": 2.0, "tpot_s": 0.2}, "m", Slo(3.0, 0.2)),
        ({OBJECTIVE: "smooth"}, {"ttft_s": 2.0, "tpot_s": 0.2}, "m", Slo(4.0, 0.4)),
        ({OBJECTIVE: "critical"}, {}, "m", Slo(1.0, 0.1)),
        ({OBJECTIVE: "smooth", "x-slo-ttft-ms": "250"}, {"ttft_s": 2.0}, "m", Slo(0.25, 0.4)),
        ({"x-llm-d-slo-ttft-ms": "250", "x-slo-ttft-ms": "1"}, {}, "m", Slo(0.25, 0.1)),
        ({"x-llm-d-slo-tpot-ms": " 12.5 "}, {}, "other", Slo(None, 0.0125)),
        ({"x-slo-tpot-ms": ".5"}, {}, "other", Slo(None, 0.0005)),
    ],
)
def test_objective_parts_come_from_header_objective_tenant_model(
    headers: dict[str, str], tenant: dict[str, Any], requested: str, slo: Slo | None
) -> None:
    identity, acme = of_acme(tenant, **PLACES)
    target = "m" if requested == "alias" else requested
    assert classified(identity, headers, True, requested, target, acme).slo == slo


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf", "1e3", "1_000", "9" * 400, "250ms", " "])
@pytest.mark.parametrize("header", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"])
def test_an_objective_header_must_be_positive_milliseconds(header: str, text: str) -> None:
    with pytest.raises(Failure) as caught:
        classified(Identity(config()), {header: text}, True, "m", "m")
    assert caught.value.status == 400
    assert caught.value.param == header


# --- limits -----------------------------------------------------------------------------------------------------------


def test_limits_come_from_tenant_name_and_target() -> None:
    limits = {"in_flight": 1}
    models = [
        {"name": "m", "limits": limits},
        {"name": "alias", "target": "m", "limits": limits},
        {"name": "free", "target": "m"},
    ]
    identity, _ = of_acme({"limits": {"tokens_per_min": 5}}, models=models)
    assert identity.usage_limits("acme", "alias", "m") == ("tenant:acme", "model:alias", "model:m")
    assert identity.usage_limits("acme", "free", "m") == ("tenant:acme", "model:m")
    assert identity.usage_limits("", "m", "m") == ("model:m",)
    assert identity.usage_limits("", "other", "other") == ()


def test_a_tenant_without_limits_counts_against_none() -> None:
    identity, acme = of_acme()
    assert identity.usage_limits(acme.name, "m", "m") == ()


# --- the session ------------------------------------------------------------------------------------------------------


def named(place: str, in_body: str = "", tenant: Tenant = NO_TENANT, **headers: str) -> str | None:
    """The session of a request with these headers (underscores for hyphens) if `place` names it."""
    http = make_mocked_request("POST", "/", headers={name.replace("_", "-"): text for name, text in headers.items()})
    texts = dict.fromkeys([one.partition(":")[2] for one in place.split(",")], in_body)
    return Identity(config(scheduling={"session": place})).session(http, texts, tenant)


def test_a_session_is_named_by_a_header_a_cookie_or_the_body() -> None:
    alice = named("body:user", "alice")
    assert alice is not None
    assert named("header:X-User", x_user="alice") == alice
    for cookies in (
        "a=b; sid=alice; SID=bob",
        "sid=alice;sid=bob",
        'x="sid=bob"; sid="alice" ',
        "asid=bob; sid=alice;",
    ):
        assert named("cookie:sid", cookie=cookies) == alice
    assert {named("body:user", "bob"), named("header:x-user", x_user="bob")}.isdisjoint({alice, None})


def test_a_request_without_the_name_has_no_session() -> None:
    assert named("header:x-user", "alice", cookie="x-user=alice") is None
    assert named("header:x-user", x_user="") is None
    assert named("cookie:sid", "alice", sid="alice", cookie="si d; ;=;x") is None
    assert named("body:user", "", user="alice") is None


def test_many_cookies_take_no_more_calls_than_one() -> None:
    identity = Identity(config(scheduling={"session": "cookie:sid"}))

    def calls_of(cookies: str) -> int:
        http = make_mocked_request("POST", "/", headers={"cookie": cookies})
        return calls_in(lambda: identity.session(http, {}))

    assert calls_of("a=b;" * 30_000 + " sid=alice") == calls_of("sid=alice")


def test_a_session_is_a_short_hash_that_differs_by_tenant() -> None:
    long = named("body:user", "alice" * 800)
    assert long is not None
    assert len(long) == 16
    assert named("body:user", "alice") == "335d7d9099a8933f"
    assert named("body:user", "alice", Tenant("acme")) not in (None, named("body:user", "alice"))


def test_session_members_are_read_from_the_body() -> None:
    settings = {"session": ["body:safety_identifier", "header:x-user", "body:user"]}
    assert Identity(config(scheduling=settings)).session_members == ("safety_identifier", "user")
    assert Identity(config()).session_members == ("prompt_cache_key",)


def test_the_first_given_session_name_counts() -> None:
    names = "header:x-user,body:user,cookie:sid"
    alice, bob = named("body:user", "alice"), named("body:user", "bob")
    assert named(names, "bob", x_user="alice", cookie="sid=bob") == alice
    assert named(names, "bob", x_user="", cookie="sid=alice") == bob
    assert named(names, cookie="sid=alice") == alice
    assert named(names) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"x_session_id": "alice", "session_id": "bob"},
        {"x_claude_code_session_id": "alice"},
        {"session_id": "alice", "thread_id": "bob"},
        {"x_session_affinity": "alice", "x_correlation_id": "bob"},
        {"in_body": "alice"},
    ],
)
def test_session_names_of_known_clients_are_read(fields: dict[str, Any]) -> None:
    assert named(",".join(Config().scheduling.session), **fields) == named("body:user", "alice")
