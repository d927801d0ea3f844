"""Reads the numbered text of simulated replicas."""

from __future__ import annotations

from llmproxy.lab.simulator.server.numbered import FIRST_ID, number_of
from llmproxy.lab.simulator.server.text import text_of, tokens_of


def fault_in(text: str) -> str | None:
    """The first token of a numbered answer that is lost, doubled, torn, or of another answer; None if all are right."""
    tokens = tokens_of(text)
    for number, token in enumerate(tokens):
        if tokens[0] < FIRST_ID or number_of(tokens[0]) != 0 or token != tokens[0] + number:
            return f"token {number} is {text_of([token])!r}"
    return None
