"""Splices change only the intended bytes, and guarded members never reach an engine."""

import json
from typing import Any

import orjson
import pytest

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.body_reader import read_form, read_large, read_small
from llmproxy.gateway.request.json_scan import BadBody, drain
from llmproxy.gateway.request.parsed_body import ParsedBody
from tests.gateway.request.test_body_reader import both

CHAT, COMPLETION, OTHER = BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.OTHER

# --- splices ----------------------------------------------------------------------------------------------------------


def assert_ends_unchanged(parsed: ParsedBody, joined: bytes) -> None:
    """The bytes before the first and after the last change are the client's."""
    assert joined.startswith(parsed.body[: parsed.body.index(b"{") + 1])
    assert joined.endswith(b"}" + parsed.body.rpartition(b"}")[2])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"include_usage": True}),
        ('"stream_options": null,', {"include_usage": True}),
        ('"stream_options": { },', {"include_usage": True}),
        ('"stream_options": {"x" : [1]},', {"include_usage": True, "x": [1]}),
        ('"stream_options": {"include_usage" : null },', {"include_usage": True}),
        ('"stream_options": {"include_usage":true,"x":{"include_usage":1},"include_usage" : null },', None),
        ('"stream_options": 5,"stream_options": null,', {"include_usage": True}),
        ('"stream_options": {"include_usage": false},', {"include_usage": True}),
        (
            '"stream_options": {"continuous_usage_stats": true},',
            {"include_usage": True, "continuous_usage_stats": False},
        ),
        (
            '"stream_options": {"include_usage":"off", "continuous_usage_stats":true, "x":1},',
            {"include_usage": True, "continuous_usage_stats": False, "x": 1},
        ),
    ],
)
@pytest.mark.parametrize("space", ["", " \n\t"])
def test_usage_is_asked_for(options: str, expected: dict[str, Any] | None, space: str) -> None:
    body = f'{space}{{{space}{options}{space}"model" : "é","stream":true, "z":1.50}}{space}'.encode()
    for parsed in both(body):
        spliced = parsed.spliced(want_usage=True)
        joined = b"".join(spliced.parts)
        wanted = orjson.loads(body)
        wanted["stream_options"] = expected or {"include_usage": True, "x": {"include_usage": 1}}
        assert spliced.hides_usage
        assert orjson.loads(joined) == wanted
        assert b'"model" : "\xc3\xa9","stream":true, "z":1.50}' in joined
        assert_ends_unchanged(parsed, joined)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, CHAT),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, CHAT),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, CHAT),
        ({"stream": True, "stream_options": {"include_usage": "maybe"}}, CHAT),
        ({"stream": True, "stream_options": "x"}, COMPLETION),
        ({"stream": False}, CHAT),
        ({}, CHAT),
        ({"stream": True}, BodyKind.RESPONSES),
        ({"stream": True}, BodyKind.MESSAGES),
        ({"stream": True}, OTHER),
    ],
)
def test_the_clients_choice_about_usage_is_kept(fields: dict[str, Any], kind: BodyKind) -> None:
    for parsed in both(orjson.dumps(fields), kind):
        spliced = parsed.spliced(want_usage=True)
        assert not spliced.hides_usage
        assert spliced.parts == (parsed.body,)


@pytest.mark.parametrize("kind", [CHAT, COMPLETION, BodyKind.RESPONSES])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","stream":true}', b'{ "priority" : 7, "model":"m"}',
        b'{"model":"m","messages":[{"priority":3}],"priority":null}', b'{"priority":-1}', b"{}", b"{ }",
    ],
)  # fmt: skip
def test_the_engines_priority_replaces_the_clients(kind: BodyKind, body: bytes) -> None:
    expected = json.loads(body) | {"priority": -100}
    for parsed in both(body, kind):
        assert json.loads(b"".join(parsed.spliced(priority=-100).parts)) == expected


def test_endpoints_without_a_priority_are_unchanged() -> None:
    body = b'{"model":"m","priority":3}'
    for kind in (OTHER, BodyKind.MESSAGES):
        assert b"".join(read_small(body, kind).spliced(priority=-100).parts) == body


@pytest.mark.parametrize(
    ("body", "priority", "expected"),
    [
        (b'{"model":"a","stream":true,"stream_options":null}', None,
         b'{"model":"target","stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":{},"stream":true,"model":"a"}', None,
         b'{"stream_options":{"include_usage":true},"stream":true,"model":"target"}'),
        (b'{"stream":true,"model":"a"}', 5,
         b'{"stream_options":{"include_usage":true},"priority":5,"stream":true,"model":"target"}'),
    ],
)  # fmt: skip
def test_model_usage_and_priority_together(body: bytes, priority: int | None, expected: bytes) -> None:
    for parsed in both(body):
        assert b"".join(parsed.spliced(model="target", want_usage=True, priority=priority).parts) == expected


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":"m"}', b'{"messages":[{"priority":-9}]}'])
def test_without_anything_to_change_the_body_is_the_clients(body: bytes) -> None:
    for parsed in both(body):
        assert parsed.spliced(model="m", trusted=False).parts == (body,)


# --- guarded members --------------------------------------------------------------------------------------------------

PULL = b'{"do_remote_prefill":true,"remote_host":"10.0.0.9"}'
TRANSFER = ("kv_transfer_params", "ec_transfer_params")
SPELT = (
    '{"model":"m","NAME":PULL}',
    '{"NAME" : PULL , "model":"m"}',
    '{"NAME":PULL,"model":"m","NAME":PULL,"x":1,"NAME":null}',
    '{"NAME":"a string","model":"m","x":{"NAME":1}}',
)


def sent(parsed: ParsedBody, **options: Any) -> list[tuple[str, Any]]:
    """The top-level members that the engine gets, with repeated names."""
    members: list[tuple[str, Any]] = json.loads(
        b"".join(parsed.spliced(**options).parts), object_pairs_hook=lambda pairs: pairs
    )
    return members


@pytest.mark.parametrize("kind", [kind for kind in BodyKind if kind is not BodyKind.FORM])
@pytest.mark.parametrize("name", TRANSFER)
@pytest.mark.parametrize("escape", [False, True])
@pytest.mark.parametrize("spelt", SPELT)
def test_transfer_parameters_reach_no_engine(spelt: str, escape: bool, name: str, kind: BodyKind) -> None:
    spelling = "".join(f"\\u{ord(letter):04x}" for letter in name) if escape else name
    body = spelt.replace("PULL", PULL.decode()).replace("NAME", spelling).encode()
    as_sent: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    expected = [(key, None if key == name else value) for key, value in as_sent]
    for parsed in both(body, kind):
        assert sent(parsed) == expected


@pytest.mark.parametrize("name", TRANSFER)
@pytest.mark.parametrize("value", ['"x"', "{}", "null"])
@pytest.mark.parametrize(
    "body",
    [
        '{"vllm_xargs":{"NAME":VALUE}}',
        '{"vllm_xargs": {"a":[1,2],"NAME" : VALUE},"vllm_xargs":{}}',
        '{"sampling_params":{"n":1,"extra_args":{"NAME":VALUE}}}',
        '{"sampling_params":{"extra_args":{"NAME":VALUE},"extra_args":null}}',
    ],
)
def test_transfer_parameters_in_engine_arguments_are_refused(body: str, value: str, name: str) -> None:
    filled = body.replace("VALUE", value)
    for spelt in (name, name.replace("a", "\\u0061")):
        for read in (read_small, lambda *args: drain(read_large(*args))):
            with pytest.raises(BadBody, match=rf"{name} is not taken from clients") as bad:
                read(filled.replace("NAME", spelt).encode(), OTHER)
            assert str(bad.value.param).endswith(f".{name}")


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs":{"x":1,"y":["kv_transfer_params"]},"sampling_params":{"n":1}}',
        b'{"vllm_xargs":null,"sampling_params":{"extra_args":null}}',
        b'{"vllm_xargs":["kv_transfer_params"],"sampling_params":{"extra_args":{"x":{"kv_transfer_params":1}}}}',
        b'{"messages":[{"content":"{\\"kv_transfer_params\\":1}","kv_transfer_params":1}],"generate_response":'
        b'{"kv_transfer_params":{"a":1}}}',
        b'{"kv_transfer_params ":1,"KV_transfer_params":1}',
    ],
)
def test_names_that_no_engine_takes_for_transfer_pass(body: bytes) -> None:
    for parsed in both(body, OTHER):
        assert b"".join(parsed.spliced().parts) == body


@pytest.mark.parametrize("kind", [CHAT, BodyKind.MESSAGES, OTHER])
@pytest.mark.parametrize("escape", [False, True])
@pytest.mark.parametrize("value", ["-9", '"first"', "null", "0"])
def test_an_untrusted_client_has_the_default_priority(value: str, escape: bool, kind: BodyKind) -> None:
    name = "prior\\u0069ty" if escape else "priority"
    body = f'{{"{name}":{value},"model":"m","x":{{"priority":-9}},"{name}" : {value}}}'.encode()
    usual = [("priority", 0), ("model", "m"), ("x", [("priority", -9)]), ("priority", 0)]
    for parsed in both(body, kind):
        assert sent(parsed, trusted=False) == usual
        assert b"".join(parsed.spliced(trusted=True).parts) == body
        own = [(key, 100 if key == "priority" else given) for key, given in usual]
        for trusted in (False, True):
            if kind is CHAT:
                assert sent(parsed, trusted=trusted, priority=100) == own


def test_a_form_with_transfer_parameters_is_refused() -> None:
    for name in TRANSFER:
        form = f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{{}}\r\n--b--\r\n'.encode()
        with pytest.raises(BadBody, match=f"{name} is not taken from clients"):
            drain(read_form(form, "multipart/form-data; boundary=b"))
