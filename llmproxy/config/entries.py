"""Entries that a cluster keeps beside those of the configuration: objectives, and names that stand for models."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.config.config import Config
from llmproxy.config.schema import ModelConfig, ObjectiveConfig
from llmproxy.core.domain import BAND_NAMES

Told = tuple[str, str]
"""Where something comes from, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries with where each comes from; names are distinct. `problems` are those of entries that are left out."""

    objectives: tuple[tuple[str, ObjectiveConfig], ...] = ()
    models: tuple[tuple[str, ModelConfig], ...] = ()
    problems: frozenset[Told] = frozenset()


def with_entries(config: Config, entries: Entries) -> tuple[Config, frozenset[Told]]:
    """The configuration with these entries beside its own, and the problems of those that are left out.

    What the configuration says itself counts. A band of an objective has the name of that objective where it has none.
    """
    problems, origins = set(entries.problems), dict(config.origins)
    objectives, models, bands = list(config.objectives), list(config.models), dict(config.bands)
    own = {one.name for one in objectives}
    for origin, objective in entries.objectives:
        if objective.name in own:
            problems.add((origin, f"the configuration has an objective {objective.name!r}, which counts"))
            continue
        origins["objectives", len(objectives)] = origin
        objectives.append(objective)
        name, band, named = objective.name.lower(), config.band(objective.criticality), {**BAND_NAMES, **bands}
        if band not in named.values() and name not in named:
            origins["bands", name] = origin
            bands[name] = band
    places = {one.name: i for i, one in enumerate(models)}
    for origin, model in entries.models:
        i = places.get(model.name, len(models))
        origins["models", i] = origin
        if i == len(models):
            models.append(model)
        elif models[i].stands_for is None:
            # What the configuration says of the name holds for it as an alias, too.
            models[i] = models[i].model_copy(update={"target": model.target, "targets": model.targets})
        else:
            del origins["models", i]
            problems.add((origin, f"the configuration has an alias {model.name!r}, which counts"))
    changed = {"objectives": tuple(objectives), "models": tuple(models), "bands": bands}
    update = {key: value for key, value in changed.items() if value != getattr(config, key)}
    return config.model_copy(update=update).with_origins(origins), frozenset(problems)
