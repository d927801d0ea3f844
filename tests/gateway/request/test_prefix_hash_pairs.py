"""The proxy expects as much of two prompts to be shared as a real vLLM shares."""

from __future__ import annotations

from itertools import takewhile

import orjson
import pytest

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import drain, scan_members
from llmproxy.gateway.request.prefix_hash import PREVIOUS, PROMPT_MEMBERS, SALT, Chain, prompt_chain
from llmproxy.gateway.request.prefix_hash_large import large_prompt_chain
from tests.gateway.request.prompt_pairs import FACTS, FALSE, LOST, PAIRS, Body

NEAR = 0.2
"""The tolerance, as a share of the prompt: blocks are coarse, and a template adds text."""


def scanned(fields: Body, kind: BodyKind) -> Chain:
    body = orjson.dumps(fields)
    return drain(large_prompt_chain(body, drain(scan_members(body, (*PROMPT_MEMBERS[kind], PREVIOUS, SALT))), kind))


def alike(one: Chain, other: Chain) -> float:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.hashes, other.hashes, strict=False)))
    return same / max(len(one.hashes), len(other.hashes))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("read", ["parsed", "scanned"])
def test_chains_are_as_similar_as_the_engines_tokens(name: str, read: str) -> None:
    (kind, one), (_, other) = PAIRS[name]
    chains = [prompt_chain(body, kind) if read == "parsed" else scanned(body, kind) for body in (one, other)]
    ours, theirs = alike(*chains), FACTS[name][2] / max(FACTS[name][:2])
    # Known differences are checked too, so that outdated reasons are removed.
    assert (theirs - ours > NEAR) is (name in LOST), f"{ours:.2f} of {theirs:.2f} are found"
    assert (ours - theirs > NEAR) is (name in FALSE), f"{ours:.2f} are expected, and {theirs:.2f} are there"


def test_two_runs_of_a_coding_agent_share_their_prompt() -> None:
    """77 KB of system and tools behind a first block that is another in each run."""

    def run(suffix: str) -> Chain:
        blocks = [
            f"x-anthropic-billing-header: cc_version=2.1.7.{suffix}; cch={suffix};",
            "You are.",
            "Rules. " * 6_000,
        ]
        tools = [{"name": f"tool_{n}", "description": "A tool of tests. " * 110, "input_schema": {}} for n in range(20)]
        system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in blocks]
        fields = {"system": system, "tools": tools, "messages": [{"role": "user", "content": f"Do {suffix}."}]}
        assert len(orjson.dumps(fields)) > 77_000
        return scanned(fields, BodyKind.MESSAGES)

    one, other = run("a1b"), run("c2d")
    assert len(one.hashes) >= 70 * 2
    assert one.hashes == other.hashes


def test_a_stored_response_ends_the_chain() -> None:
    said = {"instructions": "Be brief. " * 100, "input": "And then? " * 100}
    first, further = (prompt_chain(said | more, BodyKind.RESPONSES) for more in ({}, {PREVIOUS: "resp_1"}))
    assert 0 < len(further.hashes) < len(first.hashes)
    assert further.hashes == first.hashes[: len(further.hashes)]
    assert scanned(said | {PREVIOUS: "resp_1"}, BodyKind.RESPONSES) == further
    assert scanned(said | {PREVIOUS: None}, BodyKind.RESPONSES) == first
