"""The expected tokens of a request, learned per model from the `usage` of earlier answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from llmproxy.core.domain import RequestFacts, Usage

BYTES_PER_TOKEN = 4.0  # Bytes per token of English text with common tokenizers, used until a model's first `usage`.
OUTPUT_TOKENS = 256.0  # Output tokens per sequence, assumed until a model's first `usage`.
GAIN = 0.05
MODELS_MAX = 10_000
CONTEXT_TOKENS_MAX = 1 << 24  # Longest accepted context, and the context of a backend that publishes none.
TEXT_TOKENS_PER_BYTE = 4  # Maximum: an image counts as 4 KB and may have up to 16,384 tokens.
TEMPLATE_TOKENS_MAX = 64 * 1024  # Maximum that chat template, system prompt and tool texts add to a prompt.
TURNS_MAX = 64  # Maximum turns in one answer of the responses API. Its usage is the sum over all turns.


@dataclass(slots=True)
class Estimate:
    """Averages of `seen` answers of one model: UTF-8 bytes per prompt token, and output tokens per sequence."""

    bytes_per_token: float = BYTES_PER_TOKEN
    output_tokens: float = OUTPUT_TOKENS
    seen: int = 0


UNLEARNED = Estimate()


class Estimator:
    """Learns an `Estimate` per model. Beyond MODELS_MAX models, the least recently updated model is forgotten."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, Estimate] = OrderedDict()

    def tokens(self, model: str, facts: RequestFacts) -> tuple[int, int]:
        """Returns the expected (prompt tokens, output tokens) of a request, with the output of all its sequences."""
        learned = self._models.get(model, UNLEARNED)
        prompt = facts.prompt_tokens
        if prompt is None:
            prompt = round(facts.prompt_bytes / learned.bytes_per_token)
        output = learned.output_tokens
        if facts.max_tokens is not None:
            output = min(output, float(max(0, facts.max_tokens)))
        return max(1, prompt), round(output * facts.sequences)

    def bytes_per_token(self, model: str) -> float:
        """Returns the UTF-8 bytes of prompt text per token of `model`."""
        return self._models.get(model, UNLEARNED).bytes_per_token

    def learn(self, model: str, prompt_bytes: int | None, sequences: int | None, usage: Usage) -> None:
        """Learns from the `usage` of an answer.

        `prompt_bytes` is None if the prompt was token ids. `sequences` is None if the answer shows no whole sequences:
        their number is unknown, the answer is the rest of a stream, or no tokens are generated, as for embeddings.
        """
        learned = self._models.get(model)
        if learned is None:
            learned = Estimate()
            self.take(model, learned)
        self._models.move_to_end(model)
        learned.seen += 1
        weight = max(GAIN, 1.0 / learned.seen)
        if prompt_bytes and usage.prompt_tokens > 0:
            ratio = min(64.0, max(0.25, prompt_bytes / usage.prompt_tokens))
            learned.bytes_per_token += weight * (ratio - learned.bytes_per_token)
        if sequences is not None:
            learned.output_tokens += weight * (usage.output_tokens / max(1, sequences) - learned.output_tokens)

    def take(self, model: str, learned: Estimate) -> None:
        """Takes over the estimate of another process for a model."""
        self._models[model] = learned
        self._models.move_to_end(model)
        if len(self._models) > MODELS_MAX:
            self._models.popitem(last=False)

    @property
    def models(self) -> Mapping[str, Estimate]:
        return self._models


def usage_max(facts: RequestFacts, context_tokens: int | None, sequences: int = 1) -> Usage:
    """Returns an upper bound of the tokens that an engine can report for an answer of `sequences` sequences.

    No sequence is longer than the context, whether its prompt is text, media or a stored conversation. If no backend
    publishes its context, the bound follows from the bytes of the prompt.
    """
    if context_tokens is not None:
        prompt = context = min(context_tokens, CONTEXT_TOKENS_MAX)
    else:
        context = CONTEXT_TOKENS_MAX
        prompt = TEXT_TOKENS_PER_BYTE * facts.prompt_bytes + (facts.prompt_tokens or 0) + TEMPLATE_TOKENS_MAX
    output = context if facts.max_tokens is None else min(context, facts.max_tokens)
    return Usage(sequences * prompt, sequences * output)


def believable(usage: Usage, most: Usage) -> Usage | None:
    """Returns `usage`, without an impossible cached count; None if a count is negative or above `most`."""
    if not (0 <= usage.prompt_tokens <= most.prompt_tokens and 0 <= usage.output_tokens <= most.output_tokens):
        return None
    if usage.cached_tokens is None or 0 <= usage.cached_tokens <= usage.prompt_tokens:
        return usage
    return Usage(usage.prompt_tokens, usage.output_tokens)
