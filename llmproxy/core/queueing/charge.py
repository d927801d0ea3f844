"""The resource that fairness policies divide: tokens or requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from llmproxy.core.domain import DECODE, PREFILL, WHOLE, Request, Usage
from llmproxy.core.policy_registry import Registry
from llmproxy.core.settings import Settings


class Charge(ABC):
    """The cost of an attempt for its flow, in units of the charged resource.

    Each stage of a split request costs its own part, so both together cost as much as the unsplit request. The rest of
    a stream that broke (`Request.continued`) costs only its output, so all parts together cost as much as the unbroken
    stream.
    """

    def __init__(self, settings: Settings) -> None:
        """Reads the settings that the charge needs. Overridden by charges with settings."""

    @abstractmethod
    def estimate(self, request: Request) -> float:
        """Returns the expected cost of an attempt. Divided by the weight, it is charged to the flow at the grant."""

    @abstractmethod
    def so_far(self, request: Request, output_tokens: int) -> float:
        """Returns the cost once `output_tokens` of the answer have been streamed. It can only raise the charge."""

    @abstractmethod
    def final(self, request: Request, usage: Usage) -> float:
        """Returns the final cost of an attempt whose usage is known, also if its answer was cut short."""


charges: Registry[Callable[[Settings], Charge]] = Registry("charged resource")


@charges.register("tokens")
class Tokens(Charge):
    """Charges weighted tokens. Cached prompt tokens are known only at the end, so only `final` leaves them out."""

    def __init__(self, settings: Settings) -> None:
        prompt, output = settings.input_weight, settings.output_weight
        # Stage -> weights of prompt and output tokens; and the same for the rest of a stream.
        self._weights = {WHOLE: (prompt, output), PREFILL: (prompt, 0.0), DECODE: (0.0, output)}
        self._weights_of_rest = {stage: (0.0, output) for stage, (_, output) in self._weights.items()}

    def estimate(self, request: Request) -> float:
        prompt, output = (self._weights_of_rest if request.continued else self._weights)[request.stage]
        return prompt * request.prompt_tokens + output * request.output_tokens

    def so_far(self, request: Request, output_tokens: int) -> float:
        prompt, output = (self._weights_of_rest if request.continued else self._weights)[request.stage]
        return prompt * request.prompt_tokens + output * output_tokens

    def final(self, request: Request, usage: Usage) -> float:
        prompt, output = (self._weights_of_rest if request.continued else self._weights)[request.stage]
        return prompt * max(0, usage.prompt_tokens - (usage.cached_tokens or 0)) + output * usage.output_tokens


@charges.register("requests")
class Requests(Charge):
    """Charges 1 for each request, whatever its size."""

    def estimate(self, request: Request) -> float:
        return 0.0 if request.stage is DECODE or request.continued else 1.0

    def so_far(self, request: Request, output_tokens: int) -> float:
        return self.estimate(request)

    def final(self, request: Request, usage: Usage) -> float:
        return self.estimate(request)
