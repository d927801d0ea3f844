"""Heads that are the same, and heads that only look alike."""

from __future__ import annotations

import pytest
from aiohttp import HttpVersion10, HttpVersion11
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from llmproxy.gateway.http.kept_head import KEPT_BYTES_MAX, KeptHead

HEAD = "host: proxy\nauthorization: Bearer a\ncontent-length: 10\naccept: */*"
BYTES_MAX = 65_536


def message(head: str = HEAD, method: str = "POST", path: str = "/v1/x", modern: bool = True) -> RawRequestMessage:
    fields = tuple(
        (name.encode(), value.encode()) for name, _, value in (line.partition(": ") for line in head.split("\n"))
    )
    version = HttpVersion11 if modern else HttpVersion10
    none = CIMultiDictProxy(CIMultiDict[str]())
    return RawRequestMessage(method, path, version, none, fields, False, None, False, False, URL(path))


def kept(head: str = HEAD, bytes_max: int = BYTES_MAX) -> KeptHead | None:
    return KeptHead.of(message(head), bytes_max, "facts")


def test_a_head_is_the_same_with_a_body_of_any_length() -> None:
    one = kept()
    assert one is not None
    assert one.facts == "facts"
    assert one.is_head_of(message())
    assert one.is_head_of(message(HEAD.replace("10", "123456")))


@pytest.mark.parametrize(
    "other",
    [
        message(HEAD.replace("Bearer a", "Bearer b")),
        message(HEAD.replace("authorization", "Authorization")),
        message(HEAD.replace("accept: */*", "accept: */*\nx-request-id: 1")),
        message(HEAD.replace("\naccept: */*", "")),
        message(HEAD.replace("content-length: 10", "transfer-encoding: chunked")),
        message(HEAD.replace("content-length: 10", "content-length: " + "0" * 20 + "1")),
        message("content-length: 10\n" + HEAD.replace("content-length: 10\n", "")),
        message("host: proxy"),
        message(method="PUT"),
        message(path="/v1/y"),
        message(modern=False),
    ],
)
def test_any_other_byte_makes_another_head(other: RawRequestMessage) -> None:
    one = kept()
    assert one is not None
    assert not one.is_head_of(other)


@pytest.mark.parametrize(
    ("head", "bytes_max"),
    [
        (HEAD.replace("\ncontent-length: 10", ""), BYTES_MAX),
        (HEAD + "\ncontent-length: 10", BYTES_MAX),
        (HEAD + "\nx: " + "x" * KEPT_BYTES_MAX, BYTES_MAX),
        (HEAD, 60),
    ],
)
def test_heads_without_one_length_and_long_heads_are_not_kept(head: str, bytes_max: int) -> None:
    assert kept(head, bytes_max) is None
