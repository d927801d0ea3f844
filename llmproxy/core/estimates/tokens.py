"""What a request will cost, before the engine has counted it: learned per model from the `usage` of earlier answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from llmproxy.core.domain import RequestFacts, Usage

BYTES_PER_TOKEN = 4.0
"""Of English text under common tokenizers; holds until the first `usage` of a model is seen."""
OUTPUT_TOKENS = 256.0
"""An answer's length before any was seen; a wrong guess is trued up while the answer streams."""
GAIN = 0.05
MODELS_MAX = 10_000
CONTEXT_TOKENS_MAX = 1 << 24
"""The longest sequence that is believed of a backend, also of one that does not say how long one may be."""
TEXT_TOKENS_PER_BYTE = 4
"""The most tokens for a byte of a prompt: an image counts as 4 KB, and may be as many as 16,384 tokens."""
TEMPLATE_TOKENS_MAX = 64 * 1024
"""The most that a chat template, with its system prompt and its words about tools, adds to a prompt."""
TURNS_MAX = 64
"""The most turns of an answer of the responses API, whose usage is their sum where the engine runs tools itself."""


@dataclass(slots=True)
class Estimate:
    """What was learned of one model from `seen` answers: UTF-8 bytes of a prompt's token, tokens of a sequence."""

    bytes_per_token: float = BYTES_PER_TOKEN
    output_tokens: float = OUTPUT_TOKENS
    seen: int = 0


class Estimator:
    """Exponentially weighted means per model, the first answers in full; the least recent model is forgotten."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, Estimate] = OrderedDict()

    def tokens(self, model: str, ask: RequestFacts) -> tuple[int, int]:
        """Expected (prompt tokens, output tokens) of `ask` on `model`, all its sequences together."""
        learned = self._learned(model)
        prompt = ask.prompt_tokens
        if prompt is None:
            prompt = round(ask.prompt_bytes / learned.bytes_per_token)
        output = learned.output_tokens
        if ask.max_tokens is not None:
            output = min(output, float(max(0, ask.max_tokens)))
        return max(1, prompt), round(output * ask.sequences)

    def bytes_per_token(self, model: str) -> float:
        """UTF-8 bytes of prompt text per token of `model`."""
        return self._learned(model).bytes_per_token

    def learn(self, model: str, prompt_bytes: int | None, sequences: int | None, usage: Usage) -> None:
        """Take in one answer's `usage`.

        `prompt_bytes` is None where the prompt came as token ids, `sequences` where the engine generated nothing.
        """
        learned = self._models.get(model) or Estimate()
        self.take(model, learned)
        learned.seen += 1
        gain = max(GAIN, 1.0 / learned.seen)
        if prompt_bytes and usage.prompt_tokens > 0:
            ratio = min(64.0, max(0.25, prompt_bytes / usage.prompt_tokens))
            learned.bytes_per_token += gain * (ratio - learned.bytes_per_token)
        if sequences is not None:
            learned.output_tokens += gain * (usage.output_tokens / max(1, sequences) - learned.output_tokens)

    def take(self, model: str, learned: Estimate) -> None:
        """Go by what was learned elsewhere of a model."""
        self._models[model] = learned
        self._models.move_to_end(model)
        if len(self._models) > MODELS_MAX:
            self._models.popitem(last=False)

    @property
    def models(self) -> Mapping[str, Estimate]:
        """What was learned so far, by model."""
        return self._models

    def _learned(self, model: str) -> Estimate:
        return self._models.get(model) or Estimate()


def usage_max(ask: RequestFacts, context_tokens: int | None, sequences: int = 1) -> Usage:
    """The most tokens that an engine may have counted for an answer to `ask` in so many `sequences`.

    A sequence is no longer than the context, whatever its prompt came from: text, media, a stored conversation. Only
    where no backend tells its context, the bytes of the prompt bound it.
    """
    if context_tokens is not None:
        prompt = context = min(context_tokens, CONTEXT_TOKENS_MAX)
    else:
        context = CONTEXT_TOKENS_MAX
        prompt = TEXT_TOKENS_PER_BYTE * ask.prompt_bytes + (ask.prompt_tokens or 0) + TEMPLATE_TOKENS_MAX
    output = context if ask.max_tokens is None else min(context, ask.max_tokens)
    return Usage(sequences * prompt, sequences * output)


def believable(usage: Usage, most: Usage) -> Usage | None:
    """`usage` where no count of it is negative or above `most`, without a count of cached tokens that cannot be."""
    if not (0 <= usage.prompt_tokens <= most.prompt_tokens and 0 <= usage.output_tokens <= most.output_tokens):
        return None
    if usage.cached_tokens is None or 0 <= usage.cached_tokens <= usage.prompt_tokens:
        return usage
    return Usage(usage.prompt_tokens, usage.output_tokens)
