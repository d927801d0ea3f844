"""`GET /v1/usage`: shows a client the use of its tenant today and this month, and the tenant's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiohttp import web

from llmproxy.config import TenantConfig, tenant_limit
from llmproxy.core.pools import Pools
from llmproxy.gateway.admin.debug import page_response
from llmproxy.gateway.request.auth import Tenant
from llmproxy.observe.usage import Line, Usage, Used, total

PARTS_MAX = 1_000  # The maximum number of models in an answer. Further models count in the sums only.


class UsagePage:
    """Serves `/v1/usage`.

    Args:
        tenants: Returns the configured tenants by name.
        clock: Returns the time of the scheduler's clock, in seconds.
        knows_rates: Returns whether this process charges the rates. In a cluster, only the leader does.
    """

    def __init__(
        self,
        usage: Usage,
        pools: Pools,
        tenants: Callable[[], Mapping[str, TenantConfig]],
        clock: Callable[[], float],
        knows_rates: Callable[[], bool],
    ) -> None:
        self._usage, self._pools, self._tenants, self._clock = usage, pools, tenants, clock
        self._knows_rates = knows_rates

    async def show(self, tenant: Tenant) -> web.Response:
        """Returns the use of a tenant. A client with a plain key, which has no tenant, sees the use of its key."""
        await asyncio.to_thread(self._usage.read_others)
        lines = list(self._usage.of_tenant(tenant.name))
        if not tenant.name and tenant.key:
            lines = [line for line in lines if line.key == tenant.key]
        today = self._usage.today()
        return page_response(
            {
                "object": "usage",
                "tenant": tenant.name or None,
                "key": tenant.key,
                "time_zone": self._usage.zone,
                "day_ends_in_s": round(self._usage.day_left_s()),
                "today": {"day": today, **_parts([line for line in lines if line.day == today])},
                "month": {"month": today[:7], **_parts(lines)},
                "limits": self._limits(tenant.name),
            }
        )

    def _limits(self, tenant: str) -> dict[str, Any]:
        """Returns the configured limits of a tenant, and how much is left of its budgets and (if known) of its rates.

        Returns an empty dict for a name that is not configured.
        """
        entry = self._tenants().get(tenant)
        if entry is None:
            return {}
        left = self._pools.usage_left(tenant_limit(tenant), self._clock())
        limits = {name: value for name, value in entry.limits.model_dump().items() if value is not None}
        return limits | {
            f"{name}_left": int(value)
            for name, value in left.items()
            if value is not None and (self._knows_rates() or not name.endswith("_per_min"))
        }


def _parts(lines: Iterable[Line]) -> dict[str, Any]:
    """Returns the sums of all lines, and of each key and model."""
    lines = list(lines)
    keys: dict[str, Used] = {}
    models: dict[str, Used] = {}
    for line in lines:
        keys.setdefault(line.key, Used()).add(total([line]))
        for model, used in line.models.items():
            models.setdefault(model, Used()).add(used)
    shown = sorted(models, key=lambda model: -models[model].tokens)[:PARTS_MAX]
    return {
        **_shown(total(lines)),
        "by_key": {key: _shown(used) for key, used in sorted(keys.items())},
        "by_model": {model: _shown(models[model]) for model in shown},
    }


def _shown(used: Used) -> dict[str, int]:
    return {name: getattr(used, name) for name in used.__struct_fields__}
