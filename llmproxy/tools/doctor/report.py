"""Writes the findings of `llmproxy doctor` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmproxy.tools.doctor.look import Problem, Replica
from llmproxy.tools.terminal import printable

NAMES_SHOWN = 8


def report(replicas: Sequence[Replica]) -> str:
    """Returns the findings about each replica and about the fleet as text."""
    lines = [line for replica in replicas for line in _about(replica)]
    problems = fleet_problems(replicas)
    if problems:
        lines += ["the fleet", *_problems(problems)]
    return "\n".join(lines)


def fleet_problems(replicas: Sequence[Replica]) -> list[Problem]:
    """Returns what is wrong with a fleet although each of its replicas is fine."""
    usable = [replica for replica in replicas if replica.usable]
    problems = []
    lengths: dict[str, set[int]] = {}
    for replica in usable:
        for card in replica.models:
            if card.parent is None and card.max_model_len is not None:
                lengths.setdefault(card.name, set()).add(card.max_model_len)
    for name, found in lengths.items():
        if len(found) > 1:
            problems.append(
                Problem(
                    False,
                    f"{printable(name)} has different context lengths: {', '.join(map(str, sorted(found)))}",
                    "Long prompts go only to the replicas that can take them. Start all with one --max-model-len.",
                )
            )
    versions = {replica.version for replica in usable if replica.version}
    if len(versions) > 1:
        found_versions = ", ".join(sorted(map(printable, versions)))
        problems.append(Problem(False, f"different versions: {found_versions}", "Answers may differ between replicas."))
    return problems


def _about(replica: Replica) -> Iterator[str]:
    engine = printable(f"{replica.engine or 'an OpenAI-compatible server'} {replica.version}".strip())
    yield f"{replica.url}  {engine if replica.models else 'not usable'}"
    bases = [card for card in replica.models if card.parent is None]
    for card in bases:
        length = f", {card.max_model_len:,} tokens" if card.max_model_len else ""
        yield f"  model     {printable(card.name)}{length}"
    adapters = [printable(card.name) for card in replica.models if card.parent is not None]
    if adapters:
        more = f" and {len(adapters) - NAMES_SHOWN} more" if len(adapters) > NAMES_SHOWN else ""
        yield f"  adapters  {', '.join(adapters[:NAMES_SHOWN])}{more}"
    if replica.usable:
        yield f"  places    {replica.places if replica.places is not None else 'not published; the proxy learns them'}"
    if replica.engines > 1:
        yield f"  engines   {replica.engines} data-parallel engines behind this URL"
    if replica.kv_tokens is not None:
        yield f"  KV cache  {replica.kv_tokens:,} tokens"
    yield from _problems(replica.problems)


def _problems(problems: Sequence[Problem]) -> Iterator[str]:
    for problem in problems:
        yield f"  {'ERROR' if problem.fatal else 'note '}     {problem.text}"
        yield f"            {problem.remedy}"
