"""Policies by name, with all inputs of a run that depend on the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

from pydantic import ValidationError

from llmproxy.config import Config, SchedulingConfig, settings_of
from llmproxy.config.value_types import nearest
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.placement.policy import Placement, make, presets
from llmproxy.core.placement.price import TERMS
from llmproxy.core.settings import Settings
from llmproxy.lab.baselines import baseline_named, baselines
from llmproxy.lab.baselines.blend import blend
from llmproxy.lab.baselines.by_name import split_policy
from llmproxy.lab.baselines.policy import Surroundings
from llmproxy.lab.fleet.world import World
from llmproxy.lab.policies.oracle import Oracle

LATE = "late_"  # Prefix of a placement behind the proxy's own queue, if a baseline without a queue has the same name.
ORACLE = "oracle"
BLEND = "blend"  # A placement that only the laboratory has, behind the proxy's own queue.
NOT_HERE = ("placement", "weights", "min_shares", "seed")
"""Keys of `scheduling` that a policy name cannot have as a parameter."""
CEILED = ("critical", "default", "sheddable")  # The bands of `ceilings=1/0.95/0.85`, in this order.


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """All inputs of a run that depend on the policy."""

    name: str
    about: str
    settings: Settings
    # Interval at which the policy reads metrics; None if it reads none.
    scrape_s: float | None
    make_placement: Callable[[Surroundings, World], Placement]
    # Whether requests wait in the proxy until a backend can begin them (late binding).
    late: bool = True
    # Whether a run has a single proxy, also for a fleet with several proxies.
    central: bool = False


def own_name(config: Config) -> str:
    """Returns the policy name of the configured placement."""
    placement = config.scheduling.placement
    return LATE + placement if placement in baselines.names() else placement


def _own() -> dict[str, str]:
    """Maps the name of each policy that uses the proxy's own queue to the name of its placement."""
    names = (*presets.names(), BLEND)
    return {LATE + name if name in baselines.names() else name: name for name in names}


def is_own(text: str) -> bool:
    """Returns whether a policy, with or without parameters, uses the proxy's own queue."""
    return text.partition("(")[0] in _own()


def names() -> tuple[str, ...]:
    """Returns all policy names without parameters: own policies, baselines and the oracle."""
    return (*_own(), *baselines.names(), ORACLE)


def plan_named(text: str, config: Config) -> PolicyPlan:
    """Returns the plan of a policy like `blend` or `blend(look_ahead=0,fairness=fcfs)`.

    The parameters of llmproxy's policies are keys of the `scheduling` section; each baseline has its own parameters.
    Ceilings are written like `ceilings=1/0.95/0.85`, for critical, default and sheddable. Raises ValueError, which
    lists the known policies.
    """
    name, pairs = split_policy(text)
    given = dict(pairs)
    if name in _own():
        without = _without(text, given.pop("without", ""))
        return _own_plan(text, _own()[name], _with(config, text, given), without)
    if name == ORACLE:
        if given:
            raise ValueError(f"policy {text!r}: the oracle takes no parameters")
        about = "knows output lengths, the engines' state and caches and step times; one queue"
        settings = replace(settings_of(config), ceilings={}, preemption=False)
        return PolicyPlan(
            text, about, settings, config.poll.interval_s, lambda around, world: Oracle(world, around.clock),
            central=True,
        )  # fmt: skip
    if name not in names():
        raise ValueError(f"unknown policy {name!r} (nearest: {nearest(name, names())!r}); known: {', '.join(names())}")
    baseline = baseline_named(text)
    settings = settings_of(config)
    # Baselines use their last reading until the next one, however old it is.
    capacity = replace(settings.capacity, stale_after_s=inf)
    settings = replace(
        settings,
        fairness="fcfs",
        ordering="fcfs",
        ceilings={},
        min_shares={},
        preemption=False,
        refuse_late=False,
        capacity=capacity,
    )
    return PolicyPlan(
        baseline.name, baseline.about, settings, baseline.scrape_s, lambda around, _: baseline.make(around), late=False
    )


def _own_plan(text: str, preset: str, config: Config, without: frozenset[str]) -> PolicyPlan:
    settings = replace(settings_of(config), placement=preset)
    about = f"ours: placement {preset}, fairness {settings.fairness}, late binding from a waiting room"

    def placement(around: Surroundings, world: World) -> Placement:
        del world
        if without:
            return CostPlacement(around.rng, without=without)
        return blend(around.rng) if preset == BLEND else make(preset, around.rng)

    return PolicyPlan(text, about, settings, config.poll.interval_s, placement)


def _without(text: str, given: str) -> frozenset[str]:
    """Returns the terms that `cost(without=stream+harm)` leaves out, for ablations."""
    names = frozenset(given.split("+")) if given else frozenset()
    known = TERMS | {"objectives"}
    if names - known or (names and not text.startswith("cost(")):
        raise ValueError(f"policy {text!r}: only `cost` can be without something, of {', '.join(sorted(known))}")
    return names


def _with(config: Config, text: str, given: Mapping[str, str]) -> Config:
    known = [key for key in SchedulingConfig.model_fields if key not in NOT_HERE]
    for key in given:
        if key not in known:
            raise ValueError(f"policy {text!r}: unknown key {key!r} (nearest: {nearest(key, tuple(known))!r})")
    values: dict[str, object] = dict(given)
    if "ceilings" in given:
        values["ceilings"] = _ceilings(text, given["ceilings"])
    try:
        scheduling = SchedulingConfig.model_validate({**config.scheduling.model_dump(), **values})
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"policy {text!r}: {reasons}") from None
    return config.model_copy(update={"scheduling": scheduling})


def _ceilings(text: str, given: str) -> dict[str, str]:
    parts = given.split("/")
    try:
        falling = sorted(map(float, parts), reverse=True) == [float(part) for part in parts]
    except ValueError:
        falling = False
    if len(parts) != len(CEILED) or not falling:
        raise ValueError(
            f"policy {text!r}: ceilings are written like 1/0.95/0.85, for {', '.join(CEILED)}, and do not rise"
        )
    return dict(zip(CEILED, parts, strict=True))
