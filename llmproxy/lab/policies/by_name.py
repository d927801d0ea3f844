"""Policies by name: what a run needs to know of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

from pydantic import ValidationError

from llmproxy.config import Config, SchedulingConfig, settings_of
from llmproxy.config.document import current
from llmproxy.config.value_types import nearest
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.placement.policy import Placement, make, presets
from llmproxy.core.placement.price import TERMS
from llmproxy.core.settings import Settings
from llmproxy.lab.baselines import baseline_named, baselines
from llmproxy.lab.baselines.endpoint_picker import ENDPOINT_PICKERS
from llmproxy.lab.baselines.policy import Surroundings
from llmproxy.lab.baselines.tuning import taken_apart
from llmproxy.lab.fleet.world import World
from llmproxy.lab.policies.oracle import Oracle

LATE = "late_"
"""Prefix of our own waiting room around a preset whose plain name belongs to a baseline that binds at once."""
ORACLE = "oracle"
NOT_HERE = ("placement", "weights", "min_shares", "seed")
"""Keys of `scheduling` that cannot follow a policy's name, which is the placement, or are too complex for one value."""
CEILED = ("critical", "default", "sheddable")
"""The bands of `ceilings=1/0.95/0.85`, in its order."""


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """A policy, ready to be run. `scrape_s` is how often it reads metrics, None where it never does; a `late` one lets
    requests wait in the proxy until a backend can begin them; a `central` one is alone in front of a fleet that others
    would share between several proxies.
    """

    name: str
    about: str
    settings: Settings
    scrape_s: float | None
    make_placement: Callable[[Surroundings, World], Placement]
    late: bool = True
    central: bool = False


def own_name(config: Config) -> str:
    """What the configuration's own placement is called among the policies."""
    placement = config.scheduling.placement
    return LATE + placement if placement in baselines.names() else placement


def _own() -> dict[str, str]:
    """The policies with the proxy's own waiting room: name -> placement."""
    placements = (*presets.names(), *ENDPOINT_PICKERS)
    return {LATE + name if name in baselines.names() else name: name for name in placements}


def is_own(text: str) -> bool:
    """Whether a policy is one of ours, with or without parameters."""
    return text.partition("(")[0] in _own()


def names() -> tuple[str, ...]:
    """Every plain name: ours, our waiting room around presets that baselines have too, baselines, the oracle."""
    return (*_own(), *baselines.names(), ORACLE)


def plan_named(text: str, config: Config) -> PolicyPlan:
    """The plan of a policy named like `blend`, or with parameters like `blend(look_ahead=0,fairness=fcfs)`: for our own
    policies those are keys of the configuration's `scheduling` section, for baselines their own. Ceilings are written
    as `ceilings=1/0.95/0.85`, for critical, default and sheddable.

    Raises ValueError naming the known ones.
    """
    name, pairs = taken_apart(text)
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
    # They believe what they read last for as long as they have nothing newer.
    capacity = replace(settings.capacity, stale_after_s=inf)
    settings = replace(
        settings,
        fairness=baseline.fairness,
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
        return ENDPOINT_PICKERS[preset](around.rng) if preset in ENDPOINT_PICKERS else make(preset, around.rng)

    return PolicyPlan(text, about, settings, config.poll.interval_s, placement)


def _without(text: str, given: str) -> frozenset[str]:
    """The terms that `cost(without=stream+harm)` leaves out, to see what each is good for."""
    names = frozenset(given.split("+")) if given else frozenset()
    known = TERMS | {"objectives"}
    if names - known or (names and not text.startswith("cost(")):
        raise ValueError(f"policy {text!r}: only `cost` can be without something, of {', '.join(sorted(known))}")
    return names


def _with(config: Config, text: str, given: Mapping[str, str]) -> Config:
    known = [key for key in SchedulingConfig.model_fields if key not in NOT_HERE]
    given = {current(f"scheduling.{key}").partition(".")[2]: value for key, value in given.items()}
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
