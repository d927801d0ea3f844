"""Prompts with equal text have equal chains, and a conversation begins with the chain of each earlier turn."""

import json
import subprocess
import sys
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import PARSE_BYTES_MAX, Kind, Member, drain, scan_members
from llmproxy.gateway.request.prefix_hash import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    HEADER,
    PREVIOUS,
    PROMPT_MEMBERS,
    SALT,
    Chain,
    answer_bytes,
    empty_chain,
    prompt_chain,
)
from llmproxy.gateway.request.prefix_hash_large import large_prompt_chain

LONG = "All that follows was said before. " * 60

TEXTS = st.text(alphabet=st.sampled_from('ab"\\[]{},:\n\té漢😀\x1e'), max_size=40)
LINES = st.sampled_from(["", ": cch=1;", "\n", "\nYou are.", ": cch=é;\n\n漢"]).map(HEADER.__add__)
TEXTS |= LINES | st.sampled_from([HEADER[:7], HEADER[1:], "system"])
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)
NAMES = st.sampled_from(
    [
        "role", "name", "content", "text", "type", "input", "thinking", "timestamp", "tool_calls", "function",
        "image_url", "source", "output", "nam\\e\n",
    ]
)  # fmt: skip
TOOLS = st.dictionaries(
    st.sampled_from(["type", "name", "function", "cache_control", "input_schema"]),
    VALUES | st.dictionaries(NAMES, VALUES),
)
CONTENTS = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)
MESSAGES = st.lists(st.dictionaries(NAMES, CONTENTS, max_size=4) | CONTENTS, max_size=4)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
PROMPTS = TEXTS | st.lists(TEXTS, max_size=3) | TOKEN_IDS | st.lists(TOKEN_IDS, max_size=3) | VALUES
BODIES = st.one_of(
    st.tuples(
        st.just(BodyKind.CHAT),
        st.fixed_dictionaries({"messages": MESSAGES | VALUES}, optional={"tools": VALUES | st.lists(TOOLS)}),
    ),
    st.tuples(
        st.just(BodyKind.MESSAGES),
        st.fixed_dictionaries({"messages": MESSAGES, "system": CONTENTS, "tools": st.lists(TOOLS)}),
    ),
    st.tuples(
        st.just(BodyKind.RESPONSES),
        st.fixed_dictionaries({"input": MESSAGES | TEXTS, "instructions": TEXTS}, optional={PREVIOUS: LEAVES}),
    ),
    st.tuples(st.just(BodyKind.COMPLETION), st.fixed_dictionaries({"prompt": PROMPTS}, optional={SALT: TEXTS})),
    st.tuples(st.just(BodyKind.OTHER), st.fixed_dictionaries({"input": TEXTS})),
)


def large(body: bytes, kind: BodyKind, slice_bytes: int = 65536) -> Chain:
    members = drain(scan_members(body, (*PROMPT_MEMBERS.get(kind, ()), PREVIOUS, SALT)))
    return drain(large_prompt_chain(body, members, kind, slice_bytes))


def chat(*messages: Any, **more: Any) -> Chain:
    return prompt_chain({"messages": list(messages), **more}, BodyKind.CHAT)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def nested(depth: int, inside: Any) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


@given(BODIES, st.text(alphabet=" \t\r\n", max_size=3), st.booleans(), st.sampled_from([16, 17, 40, 65536]))
@example((BodyKind.COMPLETION, {"prompt": [["x"], 1]}), "", True, 64)
@example((BodyKind.COMPLETION, {"prompt": [1, 2.5]}), "", True, 64)
@example((BodyKind.COMPLETION, {"prompt": [[False]]}), "", True, 64)
@example((BodyKind.COMPLETION, {"prompt": [[1, True, 3]]}), "", True, 64)
@example((BodyKind.COMPLETION, {"prompt": [1, 2**32]}), "", True, 64)
@example((BodyKind.COMPLETION, {"prompt": [*range(20_000), 2.5]}), "", True, 64)
@example((BodyKind.RESPONSES, {"input": {"content": nested(5, {"text": ["deep"]})}}), "", True, 64)
@example((BodyKind.COMPLETION, {"prompt": "é" * 20 + "\\" * 9 + "漢" * 20}), "", False, 17)
@example((BodyKind.CHAT, {"messages": [said("user", nested(20, {"text": "deep"}))]}), "", True, 64)
@example((BodyKind.COMPLETION, {"prompt": "abc😀" * 20}), "", True, 16)
@example((BodyKind.COMPLETION, {"prompt": "a漢漢漢漢漢漢漢漢漢漢\\" * 3}), "", False, 16)
@example((BodyKind.CHAT, {"messages": [], "tools": nested(254, 1)}), "", True, 64)
@example((BodyKind.CHAT, {"messages": ["x"], "tools": nested(255, 1)}), "", True, 64)
def test_a_body_has_one_chain_whether_parsed_or_scanned(
    case: tuple[BodyKind, dict[str, Any]], space: str, ascii_only: bool, slice_bytes: int
) -> None:
    kind, fields = case
    body = json.dumps(fields, ensure_ascii=ascii_only, separators=(f"{space},{space}", f"{space}:{space}")).encode()
    assert large(body, kind, slice_bytes) == prompt_chain(orjson.loads(body), kind)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_long_texts_and_many_values_have_one_chain_too(ascii_only: bool) -> None:
    turns = [said("user", f'{n}: "déjà vu"\n😀 ' * 50) for n in range(300)]
    fields = {
        "messages": [said("system", LONG * 100), *turns, said("user", [{"type": "text", "text": "漢\\" * 90_000}])]
    }
    body = json.dumps(fields, ensure_ascii=ascii_only).encode()
    chain = large(body, BodyKind.CHAT)
    assert chain == prompt_chain(fields, BodyKind.CHAT)
    assert len(chain.hashes) > 1000
    ids = {"prompt": list(range(100_000, 300_000))}
    assert large(json.dumps(ids).encode(), BodyKind.COMPLETION) == prompt_chain(ids, BodyKind.COMPLETION)


@given(st.lists(st.binary(max_size=3 * BLOCK_BYTES), max_size=6))
def test_a_chain_is_independent_of_its_pieces(pieces: list[bytes]) -> None:
    grown = start = empty_chain(None)
    for piece in pieces:
        grown = grown.extended(piece)
    whole = b"".join(pieces)
    assert grown == start.extended(whole)
    assert len(grown.hashes) == len(whole) // BLOCK_BYTES
    assert grown.tail == whole[len(whole) - len(whole) % BLOCK_BYTES :]


def test_each_hash_depends_on_all_blocks_before_it() -> None:
    start = empty_chain(None)
    block, other = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    assert len(set(start.extended(block * 5).hashes)) == 5
    changed = start.extended(block + other + block * 3).hashes
    same = [one == two for one, two in zip(start.extended(block * 5).hashes, changed, strict=True)]
    assert same == [True, False, False, False, False]


def test_a_full_chain_does_not_change() -> None:
    start = empty_chain(None)
    full = start.extended(b"x" * (BLOCKS_MAX * BLOCK_BYTES + 700))
    assert len(full.hashes) == BLOCKS_MAX
    assert full.tail == b""
    assert full.extended(b"more" * BLOCK_BYTES) == full
    body = orjson.dumps({"messages": [said("user", "x" * (BLOCKS_MAX * BLOCK_BYTES * 2))]})
    assert large(body, BodyKind.CHAT) == prompt_chain(orjson.loads(body), BodyKind.CHAT)


CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sky"}'}}
USED = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}}
SPOKEN: dict[str, Any] = {"type": "output_text", "text": LONG, "annotations": [], "logprobs": [{"token": "All"}]}
ENGINES_MESSAGE = said("assistant", LONG, refusal=None, annotations=None, tool_calls=[CALL], reasoning="Hm.")


@pytest.mark.parametrize(
    ("kind", "name", "first", "answer", "turns"),
    [
        (BodyKind.CHAT, "messages", [said("user", LONG)], ENGINES_MESSAGE, [ENGINES_MESSAGE]),
        # A client library may write the role last and leave out empty members.
        (BodyKind.CHAT, "messages", [said("user", LONG)], ENGINES_MESSAGE,
         [{"content": LONG, "role": "assistant", "tool_calls": [CALL]}]),
        (BodyKind.MESSAGES, "messages", [said("user", LONG)], [{"type": "text", "text": LONG}, USED],
         [said("assistant", [{"type": "text", "text": LONG}, USED])]),
        (BodyKind.MESSAGES, "messages", [said("user", LONG)], [{"type": "text", "text": LONG}],
         [said("assistant", LONG)]),
        (BodyKind.RESPONSES, "input", [said("user", LONG)],
         [{"id": "m1", "type": "message", "status": "completed", "role": "assistant", "content": [SPOKEN]}],
         [said("assistant", LONG)]),
    ],
)  # fmt: skip
def test_the_next_turn_begins_with_the_prompt_and_its_answer(
    kind: BodyKind, name: str, first: list[Any], answer: Any, turns: list[Any]
) -> None:
    prompt = prompt_chain({name: first}, kind)
    known = prompt.extended(answer_bytes(answer, kind))
    again = prompt_chain({name: [*first, *turns, said("user", "And then? " * 100)]}, kind)
    assert 3 <= len(prompt.hashes) < len(known.hashes) < len(again.hashes)
    assert again.hashes[: len(known.hashes)] == known.hashes
    # Not the full blocks alone: up to the last byte.
    assert known == prompt_chain({name: [*first, *turns]}, kind)


def test_a_completion_continues_the_chain_of_its_answer() -> None:
    known = prompt_chain({"prompt": LONG}, BodyKind.COMPLETION).extended(answer_bytes(LONG, BodyKind.COMPLETION))
    assert known == prompt_chain({"prompt": LONG + LONG}, BodyKind.COMPLETION)


def test_prompts_that_are_equal_to_the_engine_have_one_chain() -> None:
    text = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}
    assert chat(said("user", LONG)) == chat(said("user", [text]))
    assert prompt_chain({"input": LONG}, BodyKind.RESPONSES) == prompt_chain(
        {"input": [said("user", LONG)]}, BodyKind.RESPONSES
    )
    one = {"prompt": [LONG, "second"]}
    assert prompt_chain(one, BodyKind.COMPLETION) == prompt_chain({"prompt": LONG}, BodyKind.COMPLETION)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(said("user", LONG)), chat(said("system", LONG), said("user", ""))),
        (chat(said("user", "ab"), said("user", "c")), chat(said("user", "a"), said("user", "bc"))),
        (chat(said("user", "abc")), chat(said("user", ["ab", {"type": "text", "text": "c"}]))),
        (chat(said("user", "x")), chat(said("user", "x"), tools=[{"name": "look"}])),
        (chat(said("assistant", "", tool_calls=[CALL])), chat(said("assistant", "", tool_calls=[CALL, CALL]))),
        (chat(said("user", [{"type": "image_url", "image_url": {"url": "data:a"}}])),
         chat(said("user", [{"type": "image_url", "image_url": {"url": "data:b"}}]))),
        (prompt_chain({"system": "a", "messages": []}, BodyKind.MESSAGES),
         prompt_chain({"system": "b", "messages": []}, BodyKind.MESSAGES)),
    ],
)  # fmt: skip
def test_prompts_that_differ_to_the_engine_have_other_chains(one: Chain, other: Chain) -> None:
    assert one != other


def test_an_extended_chain_keeps_the_proxys_salt() -> None:
    plain = chat(said("user", LONG))
    salted = replace(plain, salt="of a tenant")
    assert not set(salted.hashes_on("m", None)) & set(plain.hashes_on("m", None))
    further = salted.extended(LONG.encode())
    assert further.hashes_on("m", None)[: len(plain.hashes)] == salted.hashes_on("m", None)
    assert not set(further.hashes_on("m", None)) & set(plain.extended(LONG.encode()).hashes_on("m", None))


def test_models_adapters_and_salts_share_no_hashes() -> None:
    fields = {"messages": [said("user", LONG)]}
    plain, mine = prompt_chain(fields, BodyKind.CHAT), prompt_chain({**fields, SALT: "mine"}, BodyKind.CHAT)
    hashes = [
        *plain.hashes,
        *plain.hashes_on("llama", None),
        *plain.hashes_on("qwen", None),
        *plain.hashes_on("llama", "poet"),
        *mine.hashes_on("llama", None),
        *prompt_chain({**fields, SALT: "yours"}, BodyKind.CHAT).hashes_on("llama", None),
    ]
    assert len(hashes) == len(set(hashes)) == 6 * len(plain.hashes) > 6
    assert prompt_chain({**fields, SALT: None}, BodyKind.CHAT) == plain


@pytest.mark.parametrize("read", ["parsed", "scanned"])
def test_an_image_counts_by_its_identity_and_not_by_its_size(read: str) -> None:
    def of(data: str) -> Chain:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
        body = orjson.dumps({"messages": [said("user", [part, {"type": "text", "text": LONG}])]})
        return prompt_chain(orjson.loads(body), BodyKind.CHAT) if read == "parsed" else large(body, BodyKind.CHAT)

    big = "iVBORw0K" * 40_000
    assert len(of(big).hashes) == len(of("iVBO").hashes) == len(chat(said("user", LONG)).hashes)
    assert of(big) == of(big)
    assert of(big) != of(big[:-1] + "L")


@pytest.mark.parametrize(
    "broken",
    [
        b'{"content":"abc\\ud800 and more"}',
        b'{"content":1e999}',
        b'{"content" "x" true false}',
        b"{5:6}",
        b'[["a"' + b" " * (PARSE_BYTES_MAX + 1) + b"]]",
        b'{"name":[1e999]}',
    ],
)
def test_the_chain_ends_where_the_body_is_broken(broken: bytes) -> None:
    whole = orjson.dumps(said("user", LONG))
    chain = large(b'{"messages":[' + whole + b"," + broken + b"," + whole * 9 + b"]}", BodyKind.CHAT)
    assert chain.hashes == chat(said("user", LONG)).hashes


@pytest.mark.parametrize(
    "prompt", [b"[1,[2]]", b"[1,2.5]", b"[[1,2],[3],4", b'{"a":1}', b"-1", b"[" * 400 + b"]" * 400]
)
def test_invalid_prompts_have_no_chain(prompt: bytes) -> None:
    members = {"prompt": Member(Kind.ARRAY, 0, len(prompt))}
    chain = drain(large_prompt_chain(prompt, members, BodyKind.COMPLETION))
    assert chain.hashes == ()


def test_ids_far_apart_end_the_chain() -> None:
    body = b'{"prompt":[7,' + b" " * 70_000 + b"8]}"
    assert large(body, BodyKind.COMPLETION) == prompt_chain({"prompt": [7]}, BodyKind.COMPLETION)


def test_a_body_of_too_many_values_is_not_read_to_its_end() -> None:
    body = b'{"messages":[' + b"null," * 1_000_000 + b"0]}"
    slices = large_prompt_chain(body, drain(scan_members(body, ("messages",))), BodyKind.CHAT)
    assert sum(1 for _ in slices) < 200


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["k%d", "cache_control"])
def test_a_tool_of_too_many_members_is_not_read_to_its_end(name: str) -> None:
    tool = ",".join(f'"{name.replace("%d", str(number))}":1' for number in range(200_000))
    body = b'{"tools":[{%b}],"messages":[]}' % tool.encode()
    slices = large_prompt_chain(body, drain(scan_members(body, ("tools", "messages"))), BodyKind.CHAT)
    assert 50 < sum(1 for _ in slices) < 200


def test_a_long_member_is_read_in_pieces() -> None:
    body = orjson.dumps({"messages": [said("user", [{"type": "image_url", "image_url": "A" * 5_000_000}])]})
    slices = large_prompt_chain(body, drain(scan_members(body, ("messages",))), BodyKind.CHAT)
    assert sum(1 for _ in slices) >= 5_000_000 // 65536


def test_every_process_computes_the_same_chain() -> None:
    code = (
        "from llmproxy.gateway.request.prefix_hash import *; from llmproxy.gateway.http.routes import BodyKind;"
        "chain = prompt_chain({'messages': [{'role': 'user', 'content': 'word ' * 500}]}, BodyKind.CHAT);"
        "print(chain, chain.hashes_on('m', 'a'))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert "hashes=(" in outputs.pop()


def test_a_dense_parsed_body_is_not_read_to_its_end() -> None:
    dense = [{"input": 0}] * 30_000
    assert chat(*dense) == chat(*dense, said("user", LONG))
    assert chat([{f"a{n}": 0 for n in range(30_000)}]) == chat([{f"a{n}": 0 for n in range(40_000)}])
    assert chat(*["x"] * 30_000) == chat(*["x"] * 40_000)
    assert chat(*[nested(6, 0)] * 30_000) == chat(*[nested(6, 0)] * 30_000, said("user", LONG))
    assert len(chat(*[nested(6, 0)] * 30_000).hashes) < len(chat(*["x"] * 30_000).hashes) / 2
    assert chat(*dense).hashes[:20] == chat(*dense[:3000]).hashes[:20]
    assert answer_bytes(dense, BodyKind.MESSAGES) == b""
    assert answer_bytes({"tool_calls": nested(300, 0)}, BodyKind.CHAT) == b""
