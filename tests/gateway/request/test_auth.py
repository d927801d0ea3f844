"""Authentication: which tenant a key belongs to, and the rights of the tenant."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmproxy.config import Config, api_key_name, hash_of
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.request.auth import NO_TENANT, Keys, Tenant
from tests.counted import calls_in

END = datetime(2027, 1, 31, tzinfo=UTC)


def config(**fields: Any) -> Config:
    return Config.model_validate(fields)


def two_tenants(**fields: Any) -> Config:
    old = {"hash": hash_of("acme-old"), "expires": "2027-01-31"}
    acme = {"name": "acme", "keys": [old, hash_of("acme-new")]}
    return config(tenants=[acme, {"name": "zeta", "keys": [hash_of("zeta-1")]}], **fields)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refused(keys: Keys, headers: dict[str, str]) -> str:
    with pytest.raises(Failure) as caught:
        keys.check(headers)
    assert caught.value.status == 401
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    return caught.value.message


def test_keys_are_accepted_in_both_dialects() -> None:
    keys = Keys(config(api_keys=["one", "two"]))
    for good in (bearer("two"), {"authorization": "bearer one"}, {"x-api-key": "one"}):
        assert keys.check(good) == NO_TENANT
    for bad in ({}, bearer("three"), {"authorization": "Basic one"}, {"authorization": "two"}, bearer("")):
        assert refused(keys, bad).startswith("Missing or wrong API key")


def test_every_client_is_accepted_if_no_key_is_configured() -> None:
    assert Keys(config()).check({}) is NO_TENANT
    assert Keys(config()).check(bearer("whatever")) is NO_TENANT


def test_a_key_identifies_the_tenant() -> None:
    keys = Keys(two_tenants(api_keys=["plain"]), lambda: END - timedelta(seconds=1))
    for key, name in (("acme-old", "acme"), ("acme-new", "acme"), ("zeta-1", "zeta"), ("plain", "")):
        assert keys.check(bearer(key)).name == name
        assert keys.check({"x-api-key": key}).name == name


def test_a_key_has_a_name_that_is_not_the_key() -> None:
    named = {"name": "acme", "keys": [{"hash": hash_of("one"), "name": "laptop"}, hash_of("two")]}
    keys = Keys(config(api_keys=["zero", "plain"], tenants=[named]))
    names = {key: keys.check(bearer(key)).key for key in ("plain", "one", "two")}
    assert names == {"plain": api_key_name("plain"), "one": "laptop", "two": "keys[1]"}
    assert api_key_name("plain").removeprefix("api_keys:") not in hash_of("plain")
    twice = [{"hash": hash_of(key), "name": "laptop"} for key in ("one", "two")]
    with pytest.raises(ValueError, match="two keys of the name laptop"):
        config(tenants=[{"name": "acme", "keys": twice}])


def test_tenants_require_a_key_and_a_hash_is_no_key() -> None:
    keys = Keys(two_tenants())
    assert "Missing or wrong API key" in refused(keys, {})
    assert "Missing or wrong API key" in refused(keys, bearer(hash_of("zeta-1")))


def test_a_key_expires_at_its_time_and_alone() -> None:
    now = END - timedelta(microseconds=1)
    keys = Keys(two_tenants(), lambda: now)
    assert keys.check(bearer("acme-old")).name == "acme"
    now = END
    assert refused(keys, bearer("acme-old")) == "This API key has expired."
    assert keys.check(bearer("acme-new")).name == "acme"


def test_a_check_takes_as_many_calls_with_many_keys_as_with_one() -> None:
    def calls_of(keys: int) -> int:
        tenants = [{"name": f"t{i}", "keys": [hash_of(f"key-{i}")]} for i in range(keys)]
        checked = Keys(config(tenants=tenants))
        return calls_in(lambda: checked.check(bearer("key-0")))

    assert calls_of(200) == calls_of(1)


def test_keys_and_hashes_are_never_shown_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(two_tenants(api_keys=["plain-key"]), lambda: END)
    with caplog.at_level(logging.DEBUG):
        texts = [repr(keys.check(bearer("zeta-1")))]
        texts += [refused(keys, bearer("acme-old")), refused(keys, bearer("guessed"))]
    for shown in (repr(keys), str(vars(keys)), caplog.text, *texts):
        for secret in ("zeta-1", "acme-old", "plain-key", "guessed", hash_of("zeta-1").removeprefix("sha256:")):
            assert secret not in shown


def test_a_tenant_has_the_values_of_its_entry() -> None:
    entry = {
        "name": "acme",
        "keys": [hash_of("k")],
        "criticality": "urgent",
        "band_max": "critical",
        "weight": 2.5,
        "models": ["a", "b"],
        "trusted": True,
        "ttft_s": 0.5,
        "tpot_s": 0.05,
    }
    tenant = Keys(config(bands={"urgent": 50}, tenants=[entry])).check(bearer("k"))
    assert tenant == Tenant("acme", 50, 100, 2.5, frozenset({"a", "b"}), True, 0.5, 0.05)


def salted(**salts: str | None) -> dict[str, Tenant]:
    """Tenants by name, each with its `cache_salt`."""
    entries = [{"name": name, "keys": [hash_of(name)], "cache_salt": salt} for name, salt in salts.items()]
    keys = Keys(config(tenants=entries))
    return {name: keys.check(bearer(name)) for name in salts}


def test_salts_differ_between_tenants_for_any_client_salt() -> None:
    tenants = salted(a="auto", b="auto", c="a-secret-of-c-alone", d=None)
    owns = (None, "", "x", "\ud800", tenants["a"].cache_salt("x"))
    salts = [tenants[name].cache_salt(own) for name in "abc" for own in owns if own != ""]
    assert len(set(salts)) == len(salts) == 12
    assert all(salt is not None and len(salt) == 43 for salt in salts)
    assert tenants["a"].cache_salt("") == tenants["a"].cache_salt(None)
    assert [tenants["d"].cache_salt(own) for own in owns] == [None] * 5
    assert salted(a="auto")["a"].cache_salt("x") == tenants["a"].cache_salt("x"), "in every process"


def test_a_key_that_moves_to_another_tenant_gets_another_salt() -> None:
    """The new tenant must not detect prefixes that the old tenant has cached."""
    entries = [{"name": name, "keys": [hash_of("key")], "cache_salt": "auto"} for name in ("before", "after")]
    before, after = (Keys(config(tenants=[entry])).check(bearer("key")) for entry in entries)
    assert before.cache_salt("x") != after.cache_salt("x")


def test_tenants_with_the_same_secret_share_salts() -> None:
    tenants = salted(a="one-secret-of-both", b="one-secret-of-both")
    assert tenants["a"].cache_salt("x") == tenants["b"].cache_salt("x")
    for shown in (repr(tenants), repr(config(tenants=[{"name": "a", "keys": [hash_of("k")], "cache_salt": "s" * 16}]))):
        assert "one-secret" not in shown
        assert "s" * 16 not in shown


def test_a_tenant_may_use_only_its_listed_models() -> None:
    tenant = Tenant("acme", models=frozenset({"a"}))
    assert (tenant.allows("a"), tenant.allows("A"), tenant.allows("b"), tenant.allows("")) == (True, *(False,) * 3)
    assert Tenant("acme").allows("anything")
    assert NO_TENANT.allows("anything")
