"""Converts objects of the Gateway API Inference Extension to entries of the configuration.

The functions have no side effects, and the order of the objects does not matter. An InferenceObjective becomes an
objective whose band is its priority. A rule of an InferenceModelRewrite becomes an alias for each name that the rule
matches; a rule without matches becomes the alias for every other name. If several objects define a name, the oldest
object counts, then the first by name. Within an object, the first rule counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
import pydantic

from llmproxy.backends.kubernetes.objects import CustomObject, ObjectiveSpec, PoolRefs, RewriteRule, RewriteSpec
from llmproxy.config import Entries, ModelConfig, ObjectiveConfig
from llmproxy.config.entries import EntryProblem
from llmproxy.core.backends.catalogue import ANY

OBJECTIVE, REWRITE = "InferenceObjective", "InferenceModelRewrite"
POOL_GROUPS = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")
"""The API groups of InferencePools: the current group, and the former group, which references may still name."""


class WrongObjectError(Exception):
    """An object that is left out: it is invalid, uses an unsupported feature, or has the name of an older object."""


def entries_of(objects: Iterable[tuple[str, CustomObject]], pools: Collection[tuple[str, str]]) -> Entries:
    """Returns the configuration entries of `objects` (kind, object) that refer to `pools` (namespace, name).

    If two objects have the same kind, namespace and name, for example in an old and a new API group, the first counts.
    An invalid object is left out, and is listed in the problems of the result.
    """
    found: dict[tuple[str, str, str], CustomObject] = {}
    for kind, one in objects:
        found.setdefault((kind, one.metadata.namespace, one.metadata.name), one)
    objectives: dict[str, tuple[str, ObjectiveConfig]] = {}
    models: dict[str, tuple[str, ModelConfig]] = {}
    problems: set[EntryProblem] = set()
    for (kind, namespace, name), one in sorted(found.items(), key=lambda item: _age(*item)):
        origin = f"{kind} {namespace}/{name}"
        try:
            if not _is_for(one, namespace, pools):
                continue
            if kind == OBJECTIVE:
                objective = _objective(name, msgspec.convert(one.spec, ObjectiveSpec))
                older, _ = objectives.setdefault(name, (origin, objective))
                if older != origin:
                    raise WrongObjectError(f"{older} is older and has the same name, so it counts")
            else:
                for model in _models(msgspec.convert(one.spec, RewriteSpec)):
                    models.setdefault(model.name, (origin, model))
        except (msgspec.ValidationError, WrongObjectError) as error:
            problems.add((origin, str(error).replace("`$", "`spec")))
        except pydantic.ValidationError as error:
            problems.add((origin, "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())))
    return Entries(tuple(objectives.values()), tuple(models.values()), frozenset(problems))


def _age(key: tuple[str, str, str], one: CustomObject) -> tuple[str, ...]:
    # All timestamps are in UTC, to the second, so that their texts sort by time.
    _, namespace, name = key
    return one.metadata.creation_timestamp or "", name, namespace


def _is_for(one: CustomObject, namespace: str, pools: Collection[tuple[str, str]]) -> bool:
    """Returns whether an object refers to one of these pools.

    Raises WrongObjectError and msgspec.ValidationError for invalid references.
    """
    refs = msgspec.convert(one.spec, PoolRefs)
    named = [*([refs.pool_ref] if refs.pool_ref is not None else []), *(refs.pool_refs or ())]
    if any(
        (namespace, ref.name) in pools and ref.group in POOL_GROUPS and ref.kind == "InferencePool" for ref in named
    ):
        return True
    if refs.pool_selector is None:
        if not named:
            raise WrongObjectError("it names no InferencePool: set spec.poolRef")
        return False
    if any(refs.pool_selector.values()):
        raise WrongObjectError("spec.poolSelector is not read: name the InferencePool by spec.poolRef")
    return any(namespace == pool_namespace for pool_namespace, _ in pools)


def _objective(name: str, spec: ObjectiveSpec) -> ObjectiveConfig:
    return ObjectiveConfig(name=name, criticality=spec.priority or 0)


def _models(spec: RewriteSpec) -> list[ModelConfig]:
    """Returns the aliases that one object defines, in the order of its rules."""
    found = []
    for i, rule in enumerate(spec.rules):
        targets = _targets(rule, f"spec.rules[{i}].targets")
        for name in [match.model.value for match in rule.matches or ()] or [ANY]:
            if rule.matches and name == ANY:
                raise WrongObjectError(f"spec.rules[{i}] matches a model {ANY!r}, which is no name here")
            only = next(iter(targets)) if len(targets) == 1 else None
            found.append(ModelConfig(name=name, target=only, targets={} if only is not None else targets))
    return found


def _targets(rule: RewriteRule, place: str) -> dict[str, float]:
    """Returns target model -> weight for a rule. All weights are 1 if the rule gives none. Raises WrongObjectError."""
    given = rule.targets or []
    if not given:
        raise WrongObjectError(f"{place} is empty")
    if len({target.weight is None for target in given}) > 1:
        raise WrongObjectError(f"{place} should all have a weight, or none")
    weights: dict[str, float] = {}
    for target in given:
        weights[target.model_rewrite] = weights.get(target.model_rewrite, 0.0) + (target.weight or 1)
    return weights
