"""Loading reports all problems with their lines, and reads values as the file has them."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from llmproxy.config import Config, ConfigError, Override, hash_of, keys, load, settings_of
from llmproxy.config.keys import walk
from llmproxy.core.domain import Role
from llmproxy.core.placement.policy import presets
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.ordering import orderings
from tests.sizes import examples


def problems(path: Path | None, *overrides: Override) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return [problem.replace(str(path), "") for problem in caught.value.problems]


def test_descriptions_name_every_policy() -> None:
    for key, registry in (
        ("fairness", policies),
        ("ordering", orderings),
        ("placement", presets),
        ("fairness_cost", charges),
    ):
        description = keys()[f"scheduling.{key}"].description or ""
        assert set(re.findall(r"\w+", description)) >= set(registry.names())


@pytest.mark.parametrize(
    ("text", "message"),
    [("Header:X-User", "header:x-user"), ("COOKIE:SessionId", "cookie:SessionId"), ("body:userId", "body:userId")],
)
def test_session_name_keeps_its_case_except_for_headers(write: Any, text: str, message: str) -> None:
    assert load(write(f"scheduling: {{session: '{text}'}}")).scheduling.session == (message,)


# --- problems and their places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", ':1: prot: is not a known key (nearest known key: "port")'),
        ("\n\nmax_wait_s: 1", ':3: max_wait_s: is not a known key (nearest known key: "queue.max_wait_s")'),
        ("queue:\n  max_wait: 1", ':2: queue.max_wait: is not a known key (nearest known key: "max_wait_s")'),
        (
            "backends:\n  - url: http://a\n    max_inflight: 3",
            ':3: backends[0].max_inflight: is not a known key (nearest known key: "max_in_flight")',
        ),
        ("7: 1", ":1: 7: is not a known key"),
        ("port: abc", ":1: port: should be a valid integer, not 'abc'"),
        ("port: 70000", ":1: port: should be less than or equal to 65535, not 70000"),
        ("port: true", ":1: port: should be a number, not true"),
        ("drain_timeout_s: .inf", ":1: drain_timeout_s: should be a valid number"),
        ("host: 3", ":1: host: should be a valid string, not 3"),
        ("queue: 5", ":1: queue: should be a section"),
        ("backends: http://a", ":1: backends: should be a list"),
        ("backends:\n- {max_in_flight: 1}", ":2: backends[0].url: is missing"),
        ("backends: [7]", ":1: backends[0]: should be a section"),
        ("backends:\n- url: http://a\n  max_in_flight: 0", ":3: backends[0].max_in_flight: should be greater"),
        ("backends: ['gpu-0:8000']", "backends[0].url: 'gpu-0:8000' should start with http:// or https://"),
        ("backends: ['http://']", "backends[0].url: 'http://' names no host"),
        ("backends: ['http://a:b']", "backends[0].url: 'http://a:b' is no URL"),
        ("backends: ['http://a/x/../y']", "backends[0].url: 'http://a/x/../y' has a path that is no plain one"),
        ("backends: ['http://a//x']", "backends[0].url: 'http://a//x' has a path that is no plain one"),
        ("backends:\n- http://a:1/x\n- http://A:1/x/v1/", ":3: backends[1].url: 'http://a:1/x' is given twice"),
        ("backends:\n- url: http://a\n  tls: {ca: x}", ":3: backends[0].tls: has no effect: http://a is no https URL"),
        (
            "backends:\n- url: https://a\n  tls: {ca: x, insecure_skip_verify: true}",
            ":3: backends[0].tls: insecure_skip_verify looks at neither ca nor server_name",
        ),
        ("scaling: {min: 3, max: 2}", "scaling.max: 2 should not be below min, which is 3"),
        ("backends: ['http://a?x=1']", "should have no query"),
        ("backends:\n- http://a:1\n- http://A:1/v1/", ":3: backends[1].url: 'http://a:1' is given twice"),
        ("backends:\n- {url: http://a, name: x}\n- {url: http://b, name: x}", ":3: backends[1].name: 'x' is given"),
        ("models:\n- {name: a}\n- {name: a}", ":3: models[1].name: 'a' is given twice"),
        ("models:\n- {name: a, target: a}", ":2: models[0].target: 'a' is an alias for itself"),
        ("models:\n- {name: a, target: b}\n- {name: b, target: c}", ":2: models[0].target: 'b' is an alias too"),
        ("models:\n- {name: a, targets: {a: 1}}", ":2: models[0].targets: 'a' is an alias for itself"),
        (
            "models:\n- {name: 'a-*', base: b, target: c}",
            ":2: models[0].base: is a base model as engines list it, and not beside target or targets",
        ),
        ("models:\n- {name: a, target: b, targets: {c: 1}}", ":2: models[0].targets: is given beside target"),
        ("models:\n- name: a\n  targets:\n    b: 1\n    c: 0", ":5: models[0].targets.c: should be greater than 0"),
        (
            "models:\n- {name: a, target: x}\n- name: b\n  targets:\n    b: 1\n    a: 2",
            ":6: models[1].targets.a: 'a' is an alias too",
        ),
        ("models:\n- {name: '*', target: a, ttft_s: 1}", ":2: models[0]: * has a target or targets, and nothing else"),
        ("models:\n- {name: '*'}", ":2: models[0]: * has a target or targets"),
        ("models:\n- {name: '*', criticality: critical}", ":2: models[0]: * has a target or targets, and nothing else"),
        ("models:\n- name: a\n  criticality: critcal", ":3: models[0].criticality: 'critcal' is no band"),
        ("models:\n- name: a\n  criticality: critcal", '(nearest: "critical")'),
        ("models:\n- name: a\n  criticality: 1.5", ":3: models[0].criticality: should be the name of a band or an"),
        ("objectives:\n- {name: a, ttft_s: 0}", ":2: objectives[0].ttft_s: should be greater than 0, not 0"),
        (
            "objectives: [{name: a, criticality: 1}, {name: a, criticality: 1}]",
            "objectives[1].name: 'a' is given twice",
        ),
        ("objectives:\n- {name: a, criticality: urgent}", ":2: objectives[0].criticality: 'urgent' is no band"),
        ("bands: {critical: 7}", ":1: bands.critical: is already the name of another band"),
        ("bands: {a: 1, A: 2}", ":1: bands.A: is already the name of another band"),
        ("bands: {5: 7}", ":1: bands.5: should be a name"),
        ("scheduling:\n  fairness: fair", ":2: scheduling.fairness: 'fair' is none of "),
        ("scheduling:\n  placement: roundrobin", '(nearest: "round_robin")'),
        ("scheduling: {flow: team}", 'scheduling.flow: \'team\' should be "model", "tenant", "tenant+model" or'),
        ("scheduling: {flow: 'header:Authorization'}", ":1: scheduling.flow: 'header:Authorization' would write keys"),
        ("scheduling: {flow: 'header:x-api-key'}", "scheduling.flow: 'header:x-api-key' would write keys into logs"),
        ("scheduling: {flow: 'header:a b'}", "scheduling.flow: 'header:a b' should be"),
        (
            "scheduling:\n  session: heder:x-user",
            ':2: scheduling.session[0]: \'heder:x-user\' should be "header:NAME", "cookie:NAME" or "body:NAME", '
            'such as body:user (nearest: "header:NAME")',
        ),
        ("scheduling:\n  session:\n    - header:a\n    - user", ":4: scheduling.session[1]: 'user' should be"),
        (
            "clients:\n  allowed_origins: ['*', 'https://app.example/']",
            ":2: clients.allowed_origins[1]: 'https://app.example/' has a path: an origin ends after its host and "
            "port; write https://app.example",
        ),
        ("clients: {allowed_origins: 'https://App.example:443/x?y'}", "write https://app.example"),
        ("clients: {allowed_origins: app.example}", "'app.example' should be a scheme and a host, in ASCII"),
        ("clients: {allowed_origins: 'https://*.example'}", "should be one origin, or * alone"),
        ("clients: {allowed_origins: 'https://bücher.example'}", "should be a scheme and a host, in ASCII"),
        ("clients: {allowed_origins: 'https://a:b@app.example'}", "should be a scheme and a host, in ASCII"),
        ("clients: {allowed_origins: 'https://app.example:http'}", "is no origin: Port could not be cast"),
        ("scheduling: {session: user}", "scheduling.session[0]: 'user' should be"),
        ("scheduling: {session: 'cookie:'}", "scheduling.session[0]: 'cookie:' should be"),
        ("scheduling: {session: 'header:a b'}", "scheduling.session[0]: 'header:a b' should be"),
        ("scheduling: {weights: {a: 0}}", "scheduling.weights.a: should be greater than 0"),
        ("scheduling: {ceilings: {critical: 1.5}}", "scheduling.ceilings.critical: should be less than or equal to 1"),
        ("scheduling: {ceilings: {urgent: 1}}", "scheduling.ceilings.urgent: 'urgent' is no band"),
        ("scheduling: {ceilings: {default: 1, standard: 1}}", "ceilings.standard: is the same band as 'default'"),
        (
            "scheduling:\n  ceilings:\n    critical: 0.9\n    sheddable: 0.5",
            ":3: scheduling.ceilings.critical: band 0 would wait at 0.95, above band 100 at 0.9: "
            "ceilings must not rise as priority falls",
        ),
        ("bands: {urgent: 50}\nscheduling: {ceilings: {urgent: 0.5}}", "ceilings must not rise as priority falls"),
        ("trust_headers: everyone", ":1: trust_headers: 'everyone' does not appear to be an IPv4 or IPv6 network"),
        ("trust_headers: [10.0.0.1/8]", ":1: trust_headers: 10.0.0.1/8 has host bits set"),
        ("trust_headers: [7]", ":1: trust_headers: should be loopback, all, none, or a list of addresses"),
        ("\nhealth: {ejection_s: 50}", ":2: health.ejection_max_s: 30 should not be below ejection_s, which is 50"),
        ("body_bytes_max: 2000000000", "queue.bytes_max: 1073741824 is below body_bytes_max 2000000000"),
        (
            "health: {ejection_s: 5, ejection_max_s: 4}",
            "health.ejection_max_s: 4 should not be below ejection_s, which is 5",
        ),
        ("body_bytes_max: 9\nqueue:\n  band_bytes_max: 8", ":3: queue.band_bytes_max: 8 is below body_bytes_max 9"),
        (
            f"tenants:\n- {{name: a, keys: ['{hash_of('a')}'], cache_salt: short}}",
            ":2: tenants[0].cache_salt: should be auto, or a secret of 16 characters or more",
        ),
        ("port: 80\nadmin:\n  port: 80", ":3: admin.port: 80 is the port of clients"),
        ("body_bytes_total_max: 9", ":1: body_bytes_total_max: 9 is below body_bytes_max 67108864"),
        ("body_bytes_max: 9\nqueue:\n  bytes_max: 8", ":3: queue.bytes_max: 8 is below body_bytes_max 9"),
    ],
)
def test_problem_names_line_key_and_reason(write: Any, text: str, message: str) -> None:
    assert message in "\n".join(problems(write(text)))


def test_problems_are_reported_at_once_in_file_order(write: Any) -> None:
    path = write("queue: {max_wait_s: -1}\nmodels: [{name: a, target: a}]\nport: x\nport: y\nprot: 1\nbackends: [x]\n")
    message = problems(path, Override("log_format", "xml", "--log-format"))
    places = [" ".join(problem.split()[:2]) for problem in message]
    assert places == [
        "--log-format: log_format:",
        ":1: queue.max_wait_s:",
        ":2: models[0].target:",
        ":4: port:",
        ":4: port:",
        ":5: prot:",
        ":6: backends[0].url:",
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [\n", ":3: is no valid YAML: "),
        ("port: 1\n\tq: 2\n", ":2: is no valid YAML: "),
        ("port: 1\n---\nport: 2\n", ":2: is no valid YAML: "),
        ("port: !!int x\n", ":1: is no valid YAML: 'x' does not match its tag"),
        ("port: !!timestamp x\n", ":1: is no valid YAML: 'x' does not match its tag"),
        ("port: !!python/name:os.system\n", ":1: is no valid YAML: could not determine a constructor"),
        ("\n? [a]\n: 1\n", ":2: is no valid YAML: "),
        ("port: 1\n\x07", ":2: holds a character that YAML does not allow"),
        (b"port: 1\nhost: \xff\n", ":2: is not UTF-8 text"),
        ("- a\n", ":1: should be lines of the form `key: value`"),
        ("just text", ":1: should be lines of the form `key: value`"),
        ("[" * 5000, "is nested too deeply"),
        ("#" * (5 << 20), "too large for a configuration"),
        ("queue: {max_wait_s: 1,\n max_wait_s: 2}", ":2: queue.max_wait_s: is given twice, first in line 1"),
        ("backends:\n- url: http://a\n  url: http://b", ":3: backends[0].url: is given twice, first in line 2"),
        ("x: &x [*x]", ":1: x: is not a known key"),
    ],
)
def test_broken_files_name_the_line(write: Any, text: str | bytes, message: str) -> None:
    assert message in "\n".join(problems(write(text)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        # Keys of other programs whose letters happen to match an unrelated key.
        ("max_num_seqs: 8", None),
        ("max_num_batched_tokens: 8192", None),
        ("zzz: 1", None),
        ("slo_windows: 8", "scheduling.slo_window_s"),
        ("rpm: 1", None),
        ("models: [{name: a, limits: {tpm: 1}}]", "tokens_per_min"),
    ],
)
def test_a_key_is_named_only_where_it_is_similar(write: Any, text: str, named: str | None) -> None:
    (problem,) = problems(write(text))
    assert problem.partition("is not a known key")[2] == (f' (nearest known key: "{named}")' if named else "")


def test_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == [": cannot be read: No such file or directory"]
    assert problems(tmp_path) == [": cannot be read: Is a directory"]


def test_keys_and_passwords_are_never_repeated(write: Any) -> None:
    path = write("api_keys: [s3cret word]\nbackend_api_key: [s3cret]\nbackends: ['http://u:s3cret@a', 's3cret@b']")
    message = problems(path)
    assert len(message) == 4
    assert "s3cret" not in "\n".join(message)
    config = load(write("api_keys: [s3cret]\nbackend_api_key: s3cret\nbackends: [{url: http://a, api_key: s3cret}]"))
    assert "s3cret" not in repr(config)
    assert config.api_keys == ("s3cret",)


CONFIGURATIONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["http://a", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted({key.last for key in walk(Config)})) | st.text(max_size=3), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.one_of(CONFIGURATIONS.map(yaml.safe_dump), st.text(alphabet="a:-[]{}&*!|>\"'#%@\n\t ,1.", max_size=40)))
def test_any_text_is_a_configuration_or_a_problem(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    message: tuple[str, ...] | None = None
    try:
        load(path)
    except ConfigError as error:
        message = error.problems
    assert message is None or (message and all(problem.startswith(f"{path}:") for problem in message))


# --- values and meanings ----------------------------------------------------------------------------------------------


def test_overrides_replace_the_file_and_the_defaults(write: Any) -> None:
    path = write("port: 1\nqueue: {max_wait_s: 2, requests_max: 3}\nbackends: [http://a, http://b]")
    variable, flag = (
        Override("queue.max_wait_s", "4", "LLMPROXY_QUEUE_MAX_WAIT_S"),
        Override("queue.max_wait_s", "5.5", "--queue-max-wait-s"),
    )
    assert load(path).queue.max_wait_s == 2
    assert load(path, [variable]).queue.max_wait_s == 4
    config = load(path, [variable, flag, Override("backends", ["http://c"], "--backend")])
    assert config.queue.max_wait_s == 5.5
    assert (config.port, config.queue.requests_max, config.queue.bytes_max) == (1, 3, 1 << 30)
    assert [backend.url for backend in config.backends] == ["http://c"]


def test_overridden_value_is_not_checked_but_its_section_is(write: Any) -> None:
    port = Override("port", "9", "--port")
    assert load(write("port: nonsense"), [port]).port == 9
    message = problems(write("queue: 7"), Override("queue.max_wait_s", "9", "--queue-max-wait-s"))
    assert message == [":1: queue: should be a section: lines of the form `key: value`, indented below it"]
    assert problems(None, Override("backends", ["http://a", "b"], "--backend"))[0].startswith("--backend: 'b' should")


@pytest.mark.parametrize("zone", ["7", "Mars/Olympus", "../etc/passwd", "", "Europe"])
def test_a_time_zone_that_does_not_exist_is_a_problem(zone: str) -> None:
    (message,) = problems(None, Override("usage.time_zone", zone, "--usage-time-zone"))
    assert message.startswith("--usage-time-zone: usage.time_zone")
    assert "is no time zone that this system knows" in message


OTHER_THAN_DEFAULT: dict[str, str | list[str]] = {
    "backend_api_key": "k",
    "admin_key": hash_of("k"),
    "discovery.kubernetes_api": "http://127.0.0.1:8001",
    "cluster.listen": "127.0.0.1:8090",
    "cluster.advertise": "10.0.0.7:8090",
    "cluster.lock": "valkey://127.0.0.1:6379",
    "admin.port": "9100",
    "timeouts.keep_alive_s": "15.0",
    "decision_log": "decisions.jsonl",
    "clients.address_requests_per_s": "0.5",
    "scaling.target_tpot_s": "0.5",
    "scaling.start_s": "30.0",
    "api_keys": ["k"],
    "backends": ["http://a"],
}


def test_every_key_outside_lists_can_be_overridden() -> None:
    for key, field in keys().items():
        same = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        value = OTHER_THAN_DEFAULT.get(key, "99999999" if field.default is None else same)
        config: Any = load(None, [Override(key, value, "here")])
        for part in key.split("."):
            config = getattr(config, "continue_" if part == "continue" else part)
        if isinstance(field.default, tuple) and key not in OTHER_THAN_DEFAULT:
            assert config == field.default
        else:
            assert config != field.default if isinstance(value, list) else str(config) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://App.Example", "https://app.example"),
        ("HTTPS://app.example:443", "https://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("*", "*"),
    ],
)
def test_origin_is_normalized_as_browsers_send_it(write: Any, text: str, message: str) -> None:
    assert load(write(f"clients: {{allowed_origins: ['{text}']}}")).clients.allowed_origins == (message,)
    several = load(write(f"clients: {{allowed_origins: '{text}, https://b.example'}}"))
    assert several.clients.allowed_origins == (message, "https://b.example")


def test_section_of_comments_has_its_defaults(write: Any) -> None:
    assert load(write("queue:\nbackends:\nscheduling: {weights: }\nplugins: null\n")) == Config()
    assert load(write("")) == load(write("# nothing\n")) == load() == Config()


def test_plain_text_stays_text(write: Any) -> None:
    config = load(write("models: [{name: no}, {name: 12:30}, {name: 2024-01-01}, {name: 0123}]"))
    assert [model.name for model in config.models] == ["no", "12:30", "2024-01-01", "0123"]


def test_anchors_and_merges_work(write: Any) -> None:
    config = load(write("backends:\n- &b {url: http://a, max_in_flight: 3}\n- {<<: *b, url: http://b}"))
    assert [(backend.url, backend.max_in_flight) for backend in config.backends] == [("http://a", 3), ("http://b", 3)]


def test_backend_url_names_the_backend_and_keeps_its_path() -> None:
    urls = ["http://GPU-0:8000/v1/", "https://gpu.example/", "http://[::1]:80", "http://GPU-0:8000/Engine-1/v1"]
    backends = load(None, [Override("backends", urls, "--backend")]).backends
    assert [(backend.url, backend.name) for backend in backends] == [
        ("http://gpu-0:8000", "gpu-0:8000"),
        ("https://gpu.example", "gpu.example"),
        ("http://[::1]:80", "[::1]:80"),
        ("http://gpu-0:8000/Engine-1", "gpu-0:8000/Engine-1"),
    ]


def test_bands_have_names_and_integers(write: Any) -> None:
    config = load(write("bands: {Urgent: 50}\nmodels: [{name: a, criticality: URGENT}, {name: b, criticality: '7'}]"))
    assert [config.band(model.criticality) for model in config.models] == [50, 7]
    assert [config.band(word) for word in ("Critical", "default", "standard", "sheddable", "urgent", 3, None)] == [
        *(100, 0, 0, -100, 50, 3, 0)
    ]
    with pytest.raises(ValueError, match="known: critical, default, standard, sheddable, idle, urgent"):
        config.band("batch")


def test_ceilings_are_by_band_over_the_defaults(write: Any) -> None:
    config = load(write("bands: {urgent: 50}\nscheduling: {ceilings: {urgent: 0.97, Sheddable: 0.5, -200: 0.1}}"))
    assert config.ceilings() == {100: 1.0, 50: 0.97, 0: 0.95, -100: 0.5, -200: 0.1}
    assert Config().ceilings() == {100: 1.0, 0: 0.95, -100: 0.85}


@pytest.mark.parametrize(
    ("text", "networks"),
    [
        ("loopback", ["127.0.0.0/8", "::1/128"]),
        ("All", ["0.0.0.0/0", "::/0"]),
        ("none", []),
        ("[]", []),
        ("[loopback, 10.0.0.0/8]", ["127.0.0.0/8", "::1/128", "10.0.0.0/8"]),
        ("10.0.0.0/8, 10.1.1.1", ["10.0.0.0/8", "10.1.1.1/32"]),
        ("''", []),
    ],
)
def test_trusted_addresses_are_networks(write: Any, text: str, networks: list[str]) -> None:
    found = load(write(f"trust_headers: {text}\nclients:\n  trusted_proxies: {text}"))
    assert found.trust_headers == found.clients.trusted_proxies == tuple(map(ip_network, networks))


def test_loopback_is_trusted_by_default_only_where_no_client_needs_a_key(write: Any) -> None:
    tenant = f"tenants: [{{name: acme, keys: ['{hash_of('k')}']}}]"
    loopback = tuple(map(ip_network, ("127.0.0.0/8", "::1/128")))
    for trust in ("", "trust_headers: Auto\n"):
        assert load(write(f"{trust}port: 1")).trusted_networks() == loopback
        assert load(write(f"{trust}{tenant}")).trusted_networks() == ()
        assert load(write(f"{trust}api_keys: [k]")).trusted_networks() == ()
    assert load(write(f"trust_headers: loopback\n{tenant}")).trusted_networks() == loopback


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().port = 1


def test_roles_are_read_and_an_unknown_role_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("backends: [{url: http://a:1, name: a, role: prefill}, {url: http://b:1, role: both}, http://c:1]")
    assert settings_of(load(path)).roles == {"a": Role.PREFILL}
    path.write_text("backends: [{url: http://a:1, role: prefil}]")
    with pytest.raises(ConfigError, match=r'config\.yaml:1: backends\[0\]\.role: .*"prefill"'):
        load(path)


def test_prompt_range_is_read_unless_it_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("backends: [{url: http://a:1, name: a, prompt_tokens: [1, 4000]}, http://b:1]\n")
    assert settings_of(load(path)).prompt_ranges == {"a": (1, 4000)}
    path.write_text("backends: [{url: http://a:1, prompt_tokens: [5, 4]}]\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:1: backends\[0\]\.prompt_tokens: should be \[from, to\]"):
        load(path)


SECRETS = [
    "cluster: {listen: '127.0.0.1:1', lock: ['valkey://user:hush@store']}",
    "admin_key: [hush]",
    "backend_api_key: {a: hush}",
    "backends: [{url: 'http://a', api_key: [hush]}]",
    "tenants: [{name: a, keys: {a: hush}}]",
    "tenants: [{name: a, keys: [{hash: [hush]}]}]",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_of_a_wrong_type_is_not_repeated(write: Any, text: str) -> None:
    found = problems(write(text))
    assert found
    assert not any("hush" in problem for problem in found)


def test_a_key_that_controls_a_terminal_is_escaped(write: Any) -> None:
    (problem,) = problems(write('"a\\e]0;\\abc": 1'))
    assert problem.isprintable()
    assert "\\x1b" in problem
