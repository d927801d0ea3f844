"""Checks between tenants, bands and queue, and the settings of the core."""

from __future__ import annotations

import pickle
import re
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llmproxy.config import Config, hash_of, load, settings_of
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.settings import Disaggregation, External, QueueSettings, Settings, Splitting, UsageLimit
from llmproxy.gateway.http.headers import PRIVILEGED
from tests import ROOT
from tests.config.test_load import problems
from tests.core.make import DEFAULTS

HASH = hash_of("first")
OTHER = hash_of("second")


# --- problems and their places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scheduling:\n  ordering: lifo",
            ":2: scheduling.ordering: 'lifo' is none of fcfs, least_slack",
        ),
        (
            "scheduling:\n  fairness_cost: token",
            ":2: scheduling.fairness_cost: 'token' is none of tokens, requests",
        ),
        ("scheduling: {placement: Blend}", ":1: scheduling.placement: 'Blend' was removed; write cost"),
        ("scheduling:\n  fairness_cost: token", '(nearest: "tokens")'),
        ("scheduling:\n  fairness: fair_shares", '(nearest: "fair_share")'),
        ("scheduling: {slo_window_s: -1}", ":1: scheduling.slo_window_s: should be greater than 0, not -1"),
        ("scheduling: {preemption: maybe}", ":1: scheduling.preemption: should be a valid boolean"),
        ("scheduling:\n  min_shares: {sheddable: 1.2}", ":2: scheduling.min_shares.sheddable: should be less than or"),
        ("scheduling:\n  min_shares: {sheddable: -0.1}", ":2: scheduling.min_shares.sheddable: should be greater than"),
        ("scheduling:\n  min_shares: {batch: 0.1}", ":2: scheduling.min_shares.batch: 'batch' is no band; known:"),
        (
            "scheduling:\n  min_shares: {0: 0.5, -100: 0.5}",
            ":2: scheduling.min_shares: add up to 1; the sum must be below 1",
        ),
        ("scheduling:\n  min_shares: {default: 0.1, 0: 0.1}", "scheduling.min_shares.0: is the same band as 'default'"),
        ("queue:\n  max_wait_s: -1", ":2: queue.max_wait_s: should be greater than 0, not -1"),
        (
            "queue:\n  band_max_wait_s: {sheddable: -1}",
            ":2: queue.band_max_wait_s.sheddable: should be greater than 0, not -1",
        ),
        ("queue:\n  band_max_wait_s: {batch: 1}", ":2: queue.band_max_wait_s.batch: 'batch' is no band"),
        (
            "queue:\n  no_backend_wait_s: -1",
            ":2: queue.no_backend_wait_s: should be greater than or equal to 0, not -1",
        ),
        ("queue:\n  flow_requests_max: 0", ":2: queue.flow_requests_max: should be greater than or equal to 1, not 0"),
        ("queue:\n  tokens_max: 0", ":2: queue.tokens_max: should be greater than or equal to 1, not 0"),
        ("queue:\n  flow_bytes_max: 8", ":2: queue.flow_bytes_max: 8 is below body_bytes_max 67108864"),
        (
            "models:\n- name: a\n  limits:\n    in_flight: 0",
            ":4: models[0].limits.in_flight: should be greater than or equal to 1, not 0",
        ),
        (
            "models:\n- name: a\n  limits: {requests_per_min: 0.5}",
            ":3: models[0].limits.requests_per_min: should be greater than or equal to 1, not 0.5",
        ),
        ("models: [{name: a, limits: {rpm: 1}}]", ":1: models[0].limits.rpm: is not a known key (nearest known key:"),
        ("models: [{name: a, tpot_s: -1}]", ":1: models[0].tpot_s: should be greater than 0, not -1"),
        ("decision_log_sample: 1.5", ":1: decision_log_sample: should be less than or equal to 1, not 1.5"),
        ("admin_key: letmein", ":1: admin_key: should be sha256: and 64 hex digits; `llmproxy hash-key` prints"),
        ("plugins: [no-module]", ":1: plugins[0]: 'no-module' should be the name of a Python module"),
        (
            "plugins:\n- json\n- no_such.module",
            ":3: plugins[1]: 'no_such.module' cannot be imported: ModuleNotFoundError: No module named 'no_such'",
        ),
    ],
)
def test_problem_names_line_key_and_reason(write: Any, text: str, message: str) -> None:
    assert message in "\n".join(problems(write(text)))


@pytest.mark.parametrize(
    ("tenant", "message"),
    [
        ("keys: [HASH]", "name: is missing"),
        ("name: ''", "name: should have at least 1 character, not ''"),
        ("name: a", "keys: is missing"),
        ("{name: a, keys: []}", "keys: is empty: a tenant is known by its keys; `llmproxy hash-key --new`"),
        ("{name: a, keys: HASH}", "keys: should be a list"),
        ("{name: a, keys: [plain]}", "keys[0].hash: should be sha256: and 64 hex digits; `llmproxy hash-key`"),
        ("{name: a, keys: [HASH0]}", "keys[0].hash: should be sha256: and 64 hex digits"),
        ("{name: a, keys: [{hash: 7}]}", "keys[0].hash: should be sha256: and 64 hex digits"),
        ("{name: a, keys: [HASH, HASH]}", "keys[1]: is the same key as tenants[0].keys[0]"),
        ("{name: a, keys: [{hash: HASH, expires: soon}]}", "keys[0].expires: should be a date or a timestamp"),
        ("{name: a, keys: [{hash: HASH, expires: 2027-02-30}]}", "keys[0].expires: should be a date or a"),
        ("{name: a, keys: [{hash: HASH, expires: 20270130}]}", "keys[0].expires: should be a date or a"),
        ("{name: a, keys: [HASH], weight: 0}", "weight: should be greater than 0, not 0"),
        ("{name: a, keys: [HASH], criticality: hihg}", "criticality: 'hihg' is no band; known: critical"),
        ("{name: a, keys: [HASH], band_max: 1.5}", "band_max: should be the name of a band or an integer"),
        ("{name: a, keys: [HASH], band_max: defualt}", "band_max: 'defualt' is no band; known: critical"),
        (
            "{name: a, keys: [HASH], criticality: critical, band_max: default}",
            "criticality: is band 100, above band_max, which is 0",
        ),
        ("{name: a, keys: [HASH], models: []}", "models: is empty: nothing could be asked for"),
        ("{name: a, keys: [HASH], ttft_s: 0}", "ttft_s: should be greater than 0, not 0"),
        (
            "{name: a, keys: [HASH], limits: {tokens_per_min: 0}}",
            "limits.tokens_per_min: should be greater than or equal to 1, not 0",
        ),
        ("{name: a, keys: [HASH], key: x}", 'key: is not a known key (nearest known key: "keys")'),
    ],
)
def test_problem_of_a_tenant_names_line_key_and_reason(write: Any, tenant: str, message: str) -> None:
    text = f"port: 1\ntenants:\n- {tenant.replace('HASH', HASH)}\n"
    found = "\n".join(problems(write(text)))
    assert f":3: tenants[0].{message}" in found
    assert "plain" not in found
    assert HASH not in found


def test_tenants_have_distinct_names_and_keys(write: Any) -> None:
    text = f"""
api_keys: [second]
tenants:
- name: a
  keys: [{HASH}]
- name: a
  keys:
  - {OTHER}
  - {HASH.upper().replace("SHA", "sha")}
"""
    assert problems(write(text)) == [
        ":6: tenants[1].name: 'a' is given twice",
        ":8: tenants[1].keys[0]: is the same key as one of api_keys",
        ":9: tenants[1].keys[1]: is the same key as tenants[0].keys[0]",
    ]


# --- values and meanings ----------------------------------------------------------------------------------------------


def test_expiry_is_a_date_or_timestamp_in_utc_or_its_zone(write: Any) -> None:
    texts = ("2027-01-31", "2027-01-31 18:00", "2027-01-31T18:00:00Z", "2027-01-31T18:00:00+02:00")
    message = ", ".join(f"{{hash: {hash_of(text)}, expires: {text}}}" for text in texts)
    tenant = load(write(f"tenants: [{{name: a, keys: [{message}, {HASH}]}}]")).tenants[0]
    hours = [None if key.expires is None else (key.expires.tzinfo, key.expires.hour) for key in tenant.keys]
    assert hours == [(UTC, 0), (UTC, 18), (UTC, 18), (UTC, 16), None]
    assert tenant.keys[0].expires == datetime(2027, 1, 31, tzinfo=UTC)


def test_band_of_a_tenant_may_equal_its_band_max(write: Any) -> None:
    config = load(write(f"tenants: [{{name: a, keys: [{HASH}], criticality: 7, band_max: 7}}]"))
    assert config.tenants[0].band_max == 7


def test_repr_of_a_configuration_has_no_hash(write: Any) -> None:
    config = load(write(f"admin_key: {HASH}\ntenants: [{{name: a, keys: [{OTHER}]}}]"))
    assert "sha256" not in repr(config)
    assert config.tenants[0].keys[0].hash == OTHER


@pytest.mark.parametrize(
    ("text", "needed"), [("", False), ("api_keys: [k]", True), (f"tenants: [{{name: a, keys: [{HASH}]}}]", True)]
)
def test_key_is_needed_with_tenants_or_api_keys(write: Any, text: str, needed: bool) -> None:
    assert load(write(text)).needs_key() is needed


@pytest.mark.parametrize(
    ("text", "lent"),
    [
        ("", False),
        ("backend_api_key: k", True),
        ("backends: [{url: http://a, api_key: k}]", True),
        ("{backend_api_key: k, host: localhost}", False),
        ("{backend_api_key: k, api_keys: [c]}", False),
        ("{backend_api_key: k, tls: {cert: c, client_ca: a}}", False),
    ],
)
def test_keys_of_backends_are_lent_to_clients_of_other_machines(write: Any, text: str, lent: bool) -> None:
    assert load(write(text)).lends_keys() is lent


@pytest.mark.parametrize("flow", ["model", "tenant", "tenant+model", "header:x-team"])
def test_flow_is_one_of_four_kinds(write: Any, flow: str) -> None:
    assert load(write(f"scheduling: {{flow: {flow.title()!r}}}")).scheduling.flow == flow


def test_all_configured_settings_reach_the_core(write: Any) -> None:
    config = load(
        write(f"""
bands: {{batch: -50}}
backends:
- {{url: http://a:1, prompt_tokens: [1, 9], role: decode}}
- url: https://x/v1
  external: {{models: {{m: n}}, max_per_day: 9, price_per_million_input: 1, price_per_million_output: 2,
    from_band: batch}}
models:
- {{name: m, limits: {{requests_per_min: 90.5}}}}
- {{name: free}}
- {{name: user-*, base: m}}
tenants:
- {{name: acme, keys: [{HASH}], limits: {{in_flight: 3, tokens_per_min: 1000}}}}
scheduling:
  fairness: slo
  ordering: fcfs
  placement: session
  fairness_cost: requests
  ceilings: {{critical: 0.99}}
  headroom_s: 7
  min_shares: {{batch: 0.05, -200: 0.01}}
  input_weight: 0.5
  output_weight: 3
  slo_window_s: 60
  preemption: false
  refuse_late: true
  look_ahead: 0
  disaggregation: 512
  kv_lease_s: 20
queue:
  requests_max: 1
  bytes_max: 100000002
  tokens_max: 3
  band_requests_max: 4
  band_bytes_max: 100000005
  band_tokens_max: 6
  flow_requests_max: 7
  flow_bytes_max: 100000008
  flow_tokens_max: 9
  no_backend_wait_s: 0
health: {{failures_before_ejection: 9}}
scaling: {{pools: [m], from_band: batch, min: 2, max: 5, utilisation: 0.7}}
""")
    )
    message = settings_of(config)
    assert message.queue == QueueSettings(1, 100000002, 3, 4, 100000005, 6, 7, 100000008, 9, 0.0, 10.0)
    assert (message.min_shares, message.ceilings[100]) == ({-50: 0.05, -200: 0.01}, 0.99)
    assert message.limits == {
        "tenant:acme": UsageLimit(in_flight=3, tokens_per_min=1000.0),
        "model:m": UsageLimit(requests_per_min=90.5),
    }
    assert message.disaggregation == Disaggregation(Splitting.TOKENS, 20.0, 512)
    assert message.scaling == replace(DEFAULTS.scaling, pools=("m",), from_band=-50, min=2, max=5, utilisation=0.7)
    assert message.externals == {"x": External(frozenset({"m"}), 1.0, 2.0, 10.0, 9.0, -50)}
    assert message.unlisted == {"user-*": "m"}
    plain = {
        "fairness": "slo", "ordering": "fcfs", "placement": "session", "fairness_cost": "requests", "headroom_s": 7.0,
        "input_weight": 0.5, "output_weight": 3.0, "slo_window_s": 60.0, "preemption": False, "refuse_late": True,
    }  # fmt: skip
    assert {name: getattr(message, name) for name in plain} == plain
    assert [one.name for one in fields(Settings) if getattr(message, one.name) == getattr(DEFAULTS, one.name)] == []


def test_band_ttl_s_is_by_band(write: Any) -> None:
    config = load(write("bands: {batch: -50}\nqueue: {band_max_wait_s: {Batch: 600, critical: 5, '-7': 9}}"))
    assert config.by_band(config.queue.band_max_wait_s) == {-50: 600, 100: 5, -7: 9}


# --- policies of third parties ----------------------------------------------------------------------------------------

PLUGIN = """
from llmproxy.plugins import FairnessPolicy, fairness_policies

@fairness_policies.register({name!r})
class Mine(FairnessPolicy):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module that can be imported. Afterwards, the module and its registered policies are removed."""
    before = dict(policies._factories)
    monkeypatch.syspath_prepend(tmp_path)
    written: list[str] = []

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield make
    for name in written:
        sys.modules.pop(name, None)
    policies._factories.clear()
    policies._factories.update(before)


def test_policy_of_a_plugin_can_be_chosen(write: Any, module: Any) -> None:
    plugin = module("my_policies", PLUGIN.format(name="Mine_First"))
    config = load(write(f"scheduling: {{fairness: Mine_First}}\nplugins: [{plugin}]"))
    assert settings_of(config).fairness == "Mine_First"
    assert load(write(f"plugins: [{plugin}]")).plugins == (plugin,), "imported once, and usable again"


def test_refusal_of_an_unknown_policy_names_policies_of_plugins(write: Any, module: Any) -> None:
    plugin = module("my_policies", PLUGIN.format(name="mine"))
    (message,) = problems(write(f"plugins: [{plugin}]\nscheduling:\n  fairness: mien"))
    assert message.startswith(":3: scheduling.fairness: 'mien' is none of ")
    assert ", mine " in message
    assert message.endswith('(nearest: "mine")')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        (PLUGIN.format(name="fcfs"), "ValueError: fairness policy 'fcfs' is registered twice"),
        ("def (", "SyntaxError: invalid syntax"),
    ],
)
def test_failing_plugin_is_a_problem_with_its_line(write: Any, module: Any, text: str, message: str) -> None:
    plugin = module("failing_policies", text)
    found = problems(write(f"port: 1\nplugins:\n- {plugin}"))
    assert [line.startswith(f":3: plugins[0]: {plugin!r} cannot be imported: {message}") for line in found] == [True]


def test_pickled_configuration_imports_its_plugins(write: Any, module: Any) -> None:
    plugin = module("my_policies", "LOADED = True")
    sent = pickle.dumps(load(write(f"plugins: [{plugin}]")))
    del sys.modules[plugin]
    config: Config = pickle.loads(sent)
    assert config.plugins == (plugin,)
    assert plugin in sys.modules


# --- the page on tenants ----------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "how-to" / "tenants.md"


def test_example_on_the_page_is_correct(write: Any) -> None:
    example = PAGE.read_text().partition("```yaml\n")[2].partition("```")[0]
    parts = example.split("sha256:…")
    message = "".join(part + (hash_of(str(i)) if i < len(parts) - 1 else "") for i, part in enumerate(parts))
    config = load(write(message))
    assert [tenant.name for tenant in config.tenants] == ["production", "research", "batch"]
    assert config.scheduling.flow == "tenant"


def test_page_lists_exactly_the_privileged_headers() -> None:
    believed = PAGE.read_text().partition("## Trusted clients")[2]
    assert set(re.findall(r"`(x-[a-z-]+)`", "\n".join(re.findall(r"^\|.*$", believed, re.MULTILINE)))) == PRIVILEGED
