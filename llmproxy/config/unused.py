"""Settings that are valid but have no effect beside other settings. `llmproxy check` warns of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from llmproxy.config.checks import Problem
from llmproxy.config.config import Config
from llmproxy.config.document import Place
from llmproxy.config.pods_url import KUBERNETES
from llmproxy.config.value_types import DNS, SRV
from llmproxy.core.domain import Role

WEIGHTLESS = frozenset({"fcfs", "round_robin"})
"""Fairness policies that ignore weights."""
COUNTING = frozenset({"fair_share", "locality_fair_share"})
"""Fairness policies that divide the charged cost."""
DUE_FIRST = frozenset({"least_slack", "edf"})
"""Orderings that look at `ttft_s`."""
PLAUSIBLE_MOST_S = {"ttft_s": 600.0, "tpot_s": 10.0}
"""Longer objectives are probably in milliseconds, the unit of headers."""
DEFAULTS = Config()


def find_unused(config: Config) -> list[Problem]:
    """The place of every setting without effect, with the reason."""
    return _weights(config) + _objectives(config) + _tls(config) + _unread(config)


def _tls(config: Config) -> list[Problem]:
    given = () if config.tls.cert is not None else ("key", "client_ca")
    reason = "has no effect without tls.cert: llmproxy serve does not start"
    return [(("tls", key), reason) for key in given if getattr(config.tls, key) is not None]


def _weights(config: Config) -> list[Problem]:
    chosen = config.scheduling
    places: list[tuple[str | int, ...]] = [
        ("tenants", i, "weight") for i, tenant in enumerate(config.tenants) if tenant.weight != 1.0
    ]
    if chosen.fairness in WEIGHTLESS:
        if chosen.weights:
            places.append(("scheduling", "weights"))
        return [(place, f"has no effect: fairness {chosen.fairness} looks at no weights") for place in places]
    if chosen.flow != "model":
        return []
    reason = "does not set tenants apart: a flow is a model (scheduling.flow), and holds the requests of all tenants"
    return [(place, reason) for place in places]


def _objectives(config: Config) -> list[Problem]:
    given: dict[Place, float] = {
        (section, i, key): value
        for section in ("models", "objectives", "tenants")
        for i, entry in enumerate(getattr(config, section))
        for key in PLAUSIBLE_MOST_S
        if (value := getattr(entry, key)) is not None
    }
    if given:
        return _unlikely(given) + _counted_only(config, given)
    chosen = config.scheduling
    nobody = "no model, tenant or objective has ttft_s or tpot_s; only trusted headers could bring objectives"
    problems: list[Problem] = []
    if chosen.fairness == "slo":
        problems.append((("scheduling", "fairness"), f"slo has no objective to measure: {nobody}"))
    if chosen.refuse_late:
        problems.append((("scheduling", "refuse_late"), f"has no effect: {nobody}"))
    return problems


def _unlikely(given: Mapping[Place, float]) -> list[Problem]:
    return [
        (place, f"is {value:g} seconds, which nearly nothing misses: {value:g} milliseconds are {value / 1e3:g}")
        for place, value in given.items()
        if value > PLAUSIBLE_MOST_S[str(place[-1])]
    ]


def _counted_only(config: Config, given: Iterable[Place]) -> list[Problem]:
    """Objectives that no chosen policy reads."""
    chosen = config.scheduling
    # A policy of a plugin may look at them.
    if config.plugins or chosen.placement == "cost" or chosen.fairness == "slo":
        return []
    looks = {"ttft_s"} if chosen.ordering in DUE_FIRST or chosen.refuse_late else set()
    policies = f"placement {chosen.placement}, ordering {chosen.ordering} and fairness {chosen.fairness}"
    reason = f"is only counted as kept or missed: {policies} do not look at it"
    return [(place, reason) for place in given if place[-1] not in looks]


def _unread(config: Config) -> list[Problem]:
    """Keys with a changed value that nothing reads, because another policy or feature is chosen."""
    # A policy of a plugin may read any key of its section.
    rules = {} if config.plugins else _read_by_policies(config)
    rules["decision_log_sample"] = config.decision_log is not None, "there is no decision_log"
    rules["admin.host"] = config.admin.port is not None, "there is no admin.port"
    rules["admin.public_metrics"] = config.admin.port is None, "everybody who reaches admin.port sees /metrics there"
    rules["trust_proxy_headers"] = bool(config.clients.trusted_proxies), "there are no clients.trusted_proxies"
    for key in ("advertise", "lock", "lock_s", "name", "pools", "member", "plaintext", "tls"):
        rules[f"cluster.{key}"] = config.cluster.listen is not None, "there is no cluster.listen"
    for key in ("name", "on_failure"):
        rules[f"shared_limits.{key}"] = config.shared_limits.store is not None, "there is no shared_limits.store"
    limits = [tenant.limits for tenant in config.tenants] + [model.limits for model in config.models]
    rated = any(one.requests_per_min is not None or one.tokens_per_min is not None for one in limits)
    rules["shared_limits.store"] = rated, "no tenant or model has requests_per_min or tokens_per_min"
    rules["retry.budget_ratio"] = config.retry.extra_attempts > 0, "retry.extra_attempts is 0"
    # Without a backend in the file, flags may add one.
    in_dns = not config.backends or any(one.url.startswith((DNS, SRV)) for one in config.backends)
    in_kubernetes = not config.backends or any(one.url.startswith(KUBERNETES) for one in config.backends)
    has_roles = not config.backends or _others_may_come(config) or any(b.role != Role.BOTH for b in config.backends)
    for key in ("disaggregation", "kv_connector", "kv_lease_s", "warm_up_pairs"):
        rules[f"scheduling.{key}"] = has_roles, "no backend has a role"
    for key in ("dns_interval_s", "misses_before_removal"):
        rules[f"discovery.{key}"] = in_dns, "the url of no backend begins with dns+ or srv+"
    rules["discovery.kubernetes_api"] = in_kubernetes, f"the url of no backend begins with {KUBERNETES}"
    idle: list[Problem] = [
        (tuple(key.split(".")), f"has no effect: {reason}")
        for key, (is_read, reason) in rules.items()
        if not is_read and attrgetter(key)(config) != attrgetter(key)(DEFAULTS)
    ]
    idle += _lone_roles(config)
    idle += [
        (("backends", i, "group_label"), f"has no effect: {one.url} names no pods with labels")
        for i, one in enumerate(config.backends)
        if one.group_label is not None and not (one.url.startswith(KUBERNETES) and "/service/" not in one.url)
    ]
    if config.scheduling.placement != "cost" and not config.plugins:
        reason = f"has no effect: placement is {config.scheduling.placement}, not cost"
        given = [i for i, backend in enumerate(config.backends) if backend.prompt_tokens is not None]
        idle += [(("backends", i, "prompt_tokens"), reason) for i in given]
    return idle


def _lone_roles(config: Config) -> list[Problem]:
    """Roles of backends that are all prefill or all decode, so that no request can be split."""
    roles = {backend.role for backend in config.backends}
    if len(roles) != 1 or roles == {Role.BOTH} or _others_may_come(config):
        return []
    lacks = "answers, so these answer too" if roles == {Role.PREFILL} else "computes prompts for others"
    reason = f"has no effect: no backend {lacks}"
    return [(("backends", i, "role"), reason) for i in range(len(config.backends))]


def _others_may_come(config: Config) -> bool:
    """Whether discovery may add backends with other roles, from a file or labels of pods."""
    return config.discovery.file is not None or any(one.url.startswith(KUBERNETES) for one in config.backends)


def _read_by_policies(config: Config) -> dict[str, tuple[bool, str]]:
    """For keys of `scheduling`: whether the chosen policies read the key, and the reason if not."""
    chosen = config.scheduling
    fairness, ordering = f"fairness is {chosen.fairness}", f"ordering is {chosen.ordering}"
    counts = chosen.fairness in COUNTING or bool(chosen.min_shares)
    weighs = counts and chosen.fairness_cost == "tokens"
    rules = {
        "session": (
            chosen.placement == "session" or any(model.targets for model in config.models),
            f"placement is {chosen.placement}, which looks at no sessions, and no model has targets",
        ),
        "fairness_cost": (counts, f"{fairness}, which shares out nothing, and there are no min_shares"),
        "prompt_window_s": (chosen.placement == "cost", f"placement is {chosen.placement}, not cost"),
        "quantum_tokens": (chosen.fairness == "locality_fair_share", f"{fairness}, not locality_fair_share"),
        "slo_window_s": (chosen.fairness == "slo", f"{fairness}, not slo"),
        "ageing_s": (chosen.ordering == "shortest", f"{ordering}, not shortest"),
    }
    for key in ("input_weight", "output_weight"):
        reason = (
            f"no tokens are charged ({fairness}, fairness_cost is {chosen.fairness_cost}), and {ordering}, not shortest"
        )
        rules[key] = weighs or chosen.ordering == "shortest", reason
    return {f"scheduling.{key}": rule for key, rule in rules.items()}
