"""Adds objectives and aliases, defined by objects of a Kubernetes cluster, to the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.config.config import Config
from llmproxy.config.schema.requests import ModelConfig, ObjectiveConfig
from llmproxy.core.domain import BAND_NAMES

EntryProblem = tuple[str, str]
"""The origin of an entry that is left out, and the reason."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Objectives and aliases that Kubernetes objects define, as (origin, entry). Names are distinct."""

    objectives: tuple[tuple[str, ObjectiveConfig], ...] = ()
    models: tuple[tuple[str, ModelConfig], ...] = ()
    problems: frozenset[EntryProblem] = frozenset()
    """Entries that are left out."""


def with_entries(config: Config, entries: Entries) -> tuple[Config, frozenset[EntryProblem]]:
    """Adds entries to a configuration. Returns the result, and the entries that are left out.

    An entry is left out if the configuration has an objective or alias of that name. A band without a name gets the
    name of its first objective.
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
            # The configured band, objectives and limits of the name hold for the alias too.
            models[i] = models[i].model_copy(update={"target": model.target, "targets": model.targets})
        else:
            del origins["models", i]
            problems.add((origin, f"the configuration has an alias {model.name!r}, which counts"))
    changed = {"objectives": tuple(objectives), "models": tuple(models), "bands": bands}
    update = {key: value for key, value in changed.items() if value != getattr(config, key)}
    return config.model_copy(update=update).with_origins(origins), frozenset(problems)
