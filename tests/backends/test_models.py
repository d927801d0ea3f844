"""A model list becomes a listing, or an error with a reason for people."""

from __future__ import annotations

import orjson
import pytest

from llmproxy.backends.models import CARD_BYTES_MAX, CARDS_MAX, COMMAS_MAX, parse_listing
from llmproxy.gateway.request.json_scan import drain

BODY = (
    b'{"object":"list","data":[{"id":"tiny","object":"model","created":1795225568,"owned_by":"vllm","root":"tiny/model",'
    b'"parent":null,"max_model_len":4096,"permission":[{"id":"modelperm-b28c","allow_sampling":true}]},'
    b'{"id":"lora-0","object":"model","created":1795225568,"owned_by":"vllm","root":"tiny/lora-0","parent":"tiny",'
    b'"max_model_len":null,"permission":[]}]}'
)


def test_reads_the_cards_in_order_with_all_their_fields() -> None:
    listing = drain(parse_listing(BODY, 3.0))
    assert listing.taken_at_s == 3.0
    base, adapter = listing.cards
    assert (base.name, base.parent, base.max_model_len) == ("tiny", None, 4096)
    assert (adapter.name, adapter.parent, adapter.max_model_len) == ("lora-0", "tiny", None)
    assert [card.fields for card in listing.cards] == orjson.loads(BODY)["data"]


def test_a_bare_card_is_a_base_model() -> None:
    (card,) = drain(parse_listing(b'{"data":[{"id":"m","parent":"","max_model_len":true}]}', 0.0)).cards
    assert (card.name, card.parent, card.max_model_len) == ("m", None, None)


def test_no_models_is_a_listing_too() -> None:
    assert drain(parse_listing(b'{"data":[]}', 0.0)).cards == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b'{"data":[{"id":"m"}]', "not JSON"),
        (b"[]", 'no "data" list'),
        (b'{"error":"Unauthorized"}', 'no "data" list'),
        (b'{"data":{}}', 'no "data" list'),
        (b'{"data":[{"id":"m"},3]}', "entry 1 .* not an object"),
        (b'{"data":[{}]}', 'entry 0 .* "id"'),
        (b'{"data":[{"id":""}]}', 'entry 0 .* "id"'),
        (b'{"data":[{"id":7}]}', 'entry 0 .* "id"'),
        (b'{"data":[{"id":"%s"}]}' % (b"x" * 2000), 'entry 0 .* "id"'),
        (b'{"data":[{"id":"m","parent":7}]}', 'entry 0 .* "parent"'),
    ],
)
def test_anything_else_is_refused_with_a_reason(body: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        drain(parse_listing(body, 0.0))


def test_the_number_of_cards_is_limited() -> None:
    cards = [{"id": str(index)} for index in range(CARDS_MAX + 1)]
    with pytest.raises(ValueError, match="10001 entries"):
        drain(parse_listing(orjson.dumps({"data": cards}), 0.0))
    assert len(drain(parse_listing(orjson.dumps({"data": cards[1:]}), 0.0)).cards) == CARDS_MAX


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([{"id": "a", "x": "y" * CARD_BYTES_MAX}], f"entry 0 .* more than the {CARD_BYTES_MAX}"),
        ([{"id": "a", "x": [[]] * (COMMAS_MAX + 1)}], f"commas, more than the {COMMAS_MAX}"),
        ([1] * (COMMAS_MAX + 2), f"commas, more than the {COMMAS_MAX}"),
    ],
)
def test_a_listing_beyond_a_limit_is_refused_with_that_limit(data: list[object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        drain(parse_listing(orjson.dumps({"data": data}), 0.0))


def test_many_adapters_are_read_in_slices() -> None:
    card = {
        "id": "adapter",
        "object": "model",
        "root": "/adapters/a",
        "parent": "base",
        "permission": [{"x": "y" * 300}],
    }
    slices = parse_listing(orjson.dumps({"object": "list", "data": [card] * 8000}), 0.0)
    assert sum(1 for _ in slices) > 80
