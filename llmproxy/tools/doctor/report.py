"""Formats the findings of `llmproxy doctor` for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llmproxy.core.domain import ModelCard
from llmproxy.tools.doctor.look import LLAMA_CPP, Problem, Replica
from llmproxy.tools.terminal import printable

NAMES_SHOWN = 8


def report(replicas: Sequence[Replica], looked_up: Iterable[str] = ()) -> str:
    """Returns the findings about each replica and about the fleet as text.

    `looked_up` are URLs whose servers DNS or Kubernetes lists.
    """
    lines = [line for replica in replicas for line in _about(replica)]
    lines += [f"{url}  not looked at: the proxy finds these servers while it runs" for url in looked_up]
    if problems := fleet_problems(replicas):
        lines += ["the fleet", *_problems(problems)]
    return "\n".join(lines)


def engine_of(replica: Replica) -> str:
    """Returns the name and the version of a replica's engine, for people."""
    return printable(f"{replica.engine or 'an OpenAI-compatible server'} {replica.version}".strip())


def base_models(replica: Replica) -> list[ModelCard]:
    return [card for card in replica.models if card.parent is None]


def fleet_problems(replicas: Sequence[Replica]) -> list[Problem]:
    """Returns the problems that only a comparison of the replicas shows, such as different engines."""
    usable = [replica for replica in replicas if replica.usable]
    problems = []
    lengths: dict[str, set[int]] = {}
    for replica in usable:
        for card in base_models(replica):
            if card.max_model_len is not None:
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
    engines = {engine_of(replica) for replica in usable if replica.version}
    if len(engines) > 1:
        text = f"different engines: {', '.join(sorted(engines))}"
        problems.append(Problem(False, text, "Answers may differ between replicas."))
    return problems


def _about(replica: Replica) -> Iterator[str]:
    yield f"{replica.backend.url}  {engine_of(replica) if replica.usable else 'not usable'}"
    for card in base_models(replica):
        length = f", {card.max_model_len:,} tokens" if card.max_model_len else ""
        yield f"  model     {printable(card.name)}{length}"
    adapters = [printable(card.name) for card in replica.models if card.parent is not None]
    if adapters:
        more = f" and {len(adapters) - NAMES_SHOWN} more" if len(adapters) > NAMES_SHOWN else ""
        yield f"  adapters  {', '.join(adapters[:NAMES_SHOWN])}{more}"
    if replica.usable:
        yield f"  batch     {_batch(replica)}"
    if replica.ranks > 1:
        yield f"  ranks     {replica.ranks} data-parallel engines behind this URL"
    if replica.kv_tokens is not None:
        yield f"  KV cache  {replica.kv_tokens:,} tokens"
    yield from _problems(replica.problems)


def _batch(replica: Replica) -> str:
    if replica.backend.max_in_flight is not None:
        return f"{replica.backend.max_in_flight} (max_in_flight)"
    if replica.batch_limit is None:
        return "not published" + (": the proxy learns its limit" if replica.has_load else "")
    if replica.engine == LLAMA_CPP:
        return f"{replica.batch_limit}: set max_in_flight to it, as `llmproxy init` does"
    return str(replica.batch_limit)


def _problems(problems: Sequence[Problem]) -> Iterator[str]:
    for problem in problems:
        yield f"  {'ERROR' if problem.fatal else 'note '}     {problem.text}"
        yield f"            {problem.remedy}"
