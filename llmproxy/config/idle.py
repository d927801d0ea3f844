"""Finds settings that are valid but implausible, or without effect because of other settings, for warnings.

The rules for a key are metadata of its field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from llmproxy.config.checks import Problem
from llmproxy.config.document import Place
from llmproxy.config.pods_url import KUBERNETES
from llmproxy.core.domain import Role

if TYPE_CHECKING:
    from llmproxy.config.config import Config

WEIGHTLESS = frozenset({"fcfs", "round_robin"})  # Fairness policies that ignore weights.
NO_OBJECTIVE = "no model, tenant or objective has ttft_s or tpot_s; only trusted headers could bring objectives"


@dataclass(frozen=True, slots=True)
class Rule:
    """Metadata of a field: decides whether a value other than the default works as it seems to."""

    # Gets the whole configuration and the section of the field. Returns why the value does not work as it seems to;
    # None if it does.
    reason: Callable[[Config, Any], str | None]


def find_idle(config: Config) -> list[Problem]:
    """Returns the place of each setting that does not work as it seems to, with the reason."""
    return list(_in_section(config, config, ()))


def _in_section(config: Config, section: BaseModel, place: Place) -> Iterator[Problem]:
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        rules = [rule for rule in field.metadata if isinstance(rule, Rule)]
        if rules and value != field.get_default(call_default_factory=True):
            yield from (
                ((*place, field.alias or key), reason) for rule in rules if (reason := rule.reason(config, section))
            )
        if isinstance(value, BaseModel):
            yield from _in_section(config, value, (*place, key))
        elif isinstance(value, tuple):
            for i, entry in enumerate(value):
                if isinstance(entry, BaseModel):
                    yield from _in_section(config, entry, (*place, key, i))


def unless(has_effect: Callable[[Config], object], reason: str | Callable[[Config], str]) -> Rule:
    """Returns the rule that the field has no effect if `has_effect` is false."""

    def rule(config: Config, _: object) -> str | None:
        if has_effect(config):
            return None
        return f"has no effect: {reason if isinstance(reason, str) else reason(config)}"

    return Rule(rule)


def unless_given(key: str) -> Rule:
    """Returns the rule that the field has no effect if `key` (dotted) is null or empty."""
    value, verb = attrgetter(key), "are" if key.endswith("s") else "is"
    return unless(lambda config: value(config) not in (None, ()), f"there {verb} no {key}")


def unless_policy(kind: str, *names: str) -> Rule:
    """Returns the rule that only the policies `names` read the field. A plugin's policy may read any field."""
    return unless(
        lambda config: config.plugins or getattr(config.scheduling, kind) in names,
        lambda config: f"{kind} is {getattr(config.scheduling, kind)}, not {' or '.join(names)}",
    )


def unless_url(*prefixes: str) -> Rule:
    """Returns the rule that the field has no effect if backends are given, and no URL begins with a prefix."""
    return unless(
        lambda config: not config.backends or any(one.url.startswith(prefixes) for one in config.backends),
        f"the url of no backend begins with {' or '.join(prefixes)}",
    )


def plausible(key: str, most_s: float) -> Rule:
    """Returns the rule that an objective above `most_s` seconds is probably in milliseconds, the unit of headers."""

    def rule(_: Config, section: object) -> str | None:
        value = getattr(section, key)
        if value <= most_s:
            return None
        return f"is {value:g} seconds, which nearly nothing misses: {value:g} milliseconds are {value / 1e3:g}"

    return Rule(rule)


def looked_at(key: str) -> Rule:
    """Returns the rule that the objective has no effect if no chosen policy reads it. A plugin's policy may read it."""

    def rule(config: Config, _: object) -> str | None:
        chosen = config.scheduling
        if config.plugins or chosen.placement == "cost" or chosen.fairness == "slo":
            return None
        if key == "ttft_s" and (chosen.ordering == "least_slack" or chosen.refuse_late):
            return None
        policies = f"placement {chosen.placement}, ordering {chosen.ordering} and fairness {chosen.fairness}"
        return f"is only counted as kept or missed: {policies} do not look at it"

    return Rule(rule)


def objectives_measured(config: Config, _: object) -> str | None:
    """Returns why `scheduling.fairness` has no effect; None if it has."""
    if config.scheduling.fairness != "slo" or has_objectives(config):
        return None
    return f"slo has no objective to measure: {NO_OBJECTIVE}"


def has_objectives(config: Config) -> bool:
    entries: tuple[Any, ...] = (*config.models, *config.objectives, *config.tenants)
    return any(one.ttft_s is not None or one.tpot_s is not None for one in entries)


def looks_at_weights(config: Config) -> bool:
    return config.scheduling.fairness not in WEIGHTLESS


def tenants_set_apart(config: Config, _: object) -> str | None:
    """Returns why `tenants[].weight` has no effect; None if it has."""
    if config.scheduling.flow != "model" or not looks_at_weights(config):
        return None
    return "does not set tenants apart: a flow is a model (scheduling.flow), and holds the requests of all tenants"


def counts_cost(config: Config) -> bool:
    chosen = config.scheduling
    return bool(config.plugins) or chosen.fairness == "fair_share" or bool(chosen.min_shares)


def others_may_come(config: Config) -> bool:
    """Returns whether discovery may add backends with other roles, from a file or from pod labels."""
    return config.discovery.file is not None or any(one.url.startswith(KUBERNETES) for one in config.backends)


def has_roles(config: Config) -> bool:
    return not config.backends or others_may_come(config) or any(one.role != Role.BOTH for one in config.backends)


def both_roles(config: Config, _: object) -> str | None:
    """Returns why `backends[].role` has no effect, for example because all backends are prefill; None if it has."""
    roles = {backend.role for backend in config.backends}
    if len(roles) != 1 or others_may_come(config):
        return None
    lacks = "answers, so these answer too" if roles == {Role.PREFILL} else "computes prompts for others"
    return f"has no effect: no backend {lacks}"


WEIGHTS = unless(looks_at_weights, lambda config: f"fairness {config.scheduling.fairness} looks at no weights")
FAIRNESS_COST = unless(
    counts_cost,
    lambda config: f"fairness is {config.scheduling.fairness}, which shares out nothing, and there are no min_shares",
)
TOKEN_WEIGHT = unless(
    lambda config: config.plugins or (counts_cost(config) and config.scheduling.fairness_cost == "tokens"),
    lambda config: (
        f"no tokens are charged: fairness is {config.scheduling.fairness}, and fairness_cost "
        f"{config.scheduling.fairness_cost}"
    ),
)
SESSION = unless(
    lambda config: (
        config.plugins or config.scheduling.placement == "session" or any(model.targets for model in config.models)
    ),
    lambda config: f"placement is {config.scheduling.placement}, which looks at no sessions, and no model has targets",
)
WITHOUT_ROLES = unless(has_roles, "no backend has a role")
