"""Makes the list of requests for a real vLLM and for the engine model, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lab.validation.vllm_replica import ListedRequest, Settings, UnfitError

ADAPTERS = ("lora-0", "lora-1")
# The tiny model has 4,096 tokens. The first few are special.
_TOKENS = range(16, 4096)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the list.

    `at_once`: all its requests are sent before the engine runs. `overflows`: they need more than the KV cache.
    """

    name: str
    requests: Sequence[ListedRequest]
    at_once: bool
    overflows: bool


def recorded_list(settings: Settings, seed: int) -> list[Part]:
    """Returns the list for a replica with these settings. Equal settings and seeds give equal lists.

    Raises UnfitError if a request is longer than the context.
    """
    rng = random.Random(seed)
    parts = [
        Part("serial", _serial(rng, settings), at_once=False, overflows=False),
        Part("burst", _burst(rng, settings), at_once=True, overflows=True),
        Part("adapters", _adapters(rng, settings), at_once=True, overflows=False),
    ]
    longest_tokens = max(len(request.prompt) + request.answer_tokens for part in parts for request in part.requests)
    if longest_tokens > settings.context_tokens:
        raise UnfitError(f"the longest request has {longest_tokens} tokens: start with that --max-model-len or more")
    return parts


def _text(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(_TOKENS, k=length))


def _serial(rng: random.Random, settings: Settings) -> list[ListedRequest]:
    block = settings.block_size
    document, exact, short = _text(rng, 10 * block + 7), _text(rng, 8 * block), _text(rng, block - 5)
    requests = [
        ListedRequest("cold", document, 2 * block),
        ListedRequest("the same again", document, 4),
        ListedRequest("next turn", _text(rng, 9), 4, after="cold"),
        ListedRequest("exact blocks, cold", exact, block),
        ListedRequest("exact blocks again", exact, 4),
        ListedRequest("next turn of exact blocks", _text(rng, block), 4, after="exact blocks, cold"),
        ListedRequest("one token beyond exact blocks", exact + _text(rng, 1), 4),
        ListedRequest("3 blocks shared", document[: 3 * block] + _text(rng, 2 * block + 3), 4),
        ListedRequest("3.5 blocks shared", document[: 3 * block + block // 2] + _text(rng, 2 * block), 4),
        ListedRequest("tail shared, head not", _text(rng, block) + document[block:], 4),
        ListedRequest("less than a block", short, 4),
        ListedRequest("less than a block again", short, 4),
        ListedRequest("salted", document, 4, salt="pepper"),
        ListedRequest("salted again", document, 4, salt="pepper"),
        ListedRequest("salted otherwise", document, 4, salt="sugar"),
        *(ListedRequest(f"{adapter}{again}", document, 4, adapter) for adapter in ADAPTERS for again in ("", " again")),
        ListedRequest("salted adapter", document, 4, ADAPTERS[0], salt="pepper"),
    ]
    # The stems are larger than the cache together, so that each evicts the blocks of an old request.
    stems = [_text(rng, rng.randrange(3 * block, 14 * block)) for _ in range(2 * settings.blocks // 14)]
    for number in range(40):
        stem = rng.choice((document, exact, *stems))
        shared = stem[: rng.choice((len(stem), len(stem), rng.randrange(1, len(stem))))]
        tail = _text(rng, rng.randrange(2 * block))
        salt, adapter = rng.choice((None, None, "pepper")), rng.choice((None, None, *ADAPTERS))
        requests.append(ListedRequest(f"mixed {number}", shared + tail, rng.randrange(1, 2 * block), adapter, salt))
    return requests


def _burst(rng: random.Random, settings: Settings) -> list[ListedRequest]:
    block, room_tokens = settings.block_size, (settings.blocks - 1) * settings.block_size
    share = room_tokens // settings.max_num_seqs
    stem = _text(rng, 2 * block)
    requests: list[ListedRequest] = []
    for number in range(3 * settings.max_num_seqs):
        prompt = _text(rng, rng.randrange(3 * share // 10, 7 * share // 10))
        if number % 3 == 0:
            prompt = stem + prompt
        elif number % 7 == 1 and requests:
            prompt = requests[-1].prompt
        requests.append(ListedRequest(f"burst {number}", prompt, rng.randrange(6 * share // 10, 9 * share // 10)))
    return requests


def _adapters(rng: random.Random, settings: Settings) -> list[ListedRequest]:
    first, second, base = *ADAPTERS, None
    order = (first, first, second, base, second, first, second, base, first, base, second, first) * 2
    return [
        ListedRequest(
            f"adapters {number}", _text(rng, rng.randrange(4, settings.block_size)), rng.randrange(8, 40), adapter
        )
        for number, adapter in enumerate(order)
    ]
