"""The band, flow, tenant, objective and limits of an arrival, which a gateway reads from keys and headers."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.config import Config, model_limit, settings_of, tenant_limit
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Slo
from llmproxy.lab.traces.arrival import Arrival


@dataclass(frozen=True, slots=True)
class ArrivalIdentity:
    """The scheduling identity of one arrival. `weight` is the fair-share weight of its flow."""

    flow: str
    max_wait_s: float
    tenant: str
    weight: float
    slo: Slo | None
    limits: tuple[str, ...]


class IdentityReader:
    """Reads the identity of arrivals. All fields of the trace are trusted, and tenants match by name."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._flow = config.scheduling.flow
        self._limits = settings_of(config).limits
        self._tenants = {tenant.name: tenant for tenant in config.tenants}
        self._models = {model.name: model for model in config.models}
        self._band_max_waits_s = config.by_band(config.queue.band_max_wait_s)

    def band(self, arrival: Arrival) -> int:
        """Returns the arrival's band, limited by its tenant's `band_max`."""
        band, tenant = self._config.band(arrival.band), self._tenants.get(arrival.tenant)
        if tenant is None or tenant.band_max is None:
            return band
        return min(band, self._config.band(tenant.band_max))

    def identity(self, arrival: Arrival, target: Target, band: int) -> ArrivalIdentity:
        tenant = self._tenants.get(arrival.tenant)
        max_wait_s = self._band_max_waits_s.get(band, self._config.queue.max_wait_s)
        flow = self._flow_of(arrival, target)
        limits = (tenant_limit(arrival.tenant), model_limit(target.requested), model_limit(target.model))
        return ArrivalIdentity(
            flow=flow,
            max_wait_s=max_wait_s if arrival.max_wait_s is None else min(arrival.max_wait_s, max_wait_s),
            tenant=arrival.tenant,
            weight=self._config.scheduling.weights.get(flow, 1.0 if tenant is None else tenant.weight),
            slo=self._slo(arrival, target),
            limits=tuple(name for name in dict.fromkeys(limits) if name in self._limits),
        )

    def _flow_of(self, arrival: Arrival, target: Target) -> str:
        if self._flow == "model":
            return target.requested
        # A trace has no headers, so a flow by header uses the tenant.
        return f"{arrival.tenant}+{target.requested}" if self._flow == "tenant+model" else arrival.tenant

    def _slo(self, arrival: Arrival, target: Target) -> Slo | None:
        """Returns the objective. Each time is the first that is set: arrival, tenant, requested model, served model."""
        entries = (
            self._tenants.get(arrival.tenant),
            self._models.get(target.requested),
            self._models.get(target.model),
        )
        said = [(arrival.ttft_slo_s, arrival.tpot_slo_s)]
        said += [(entry.ttft_s, entry.tpot_s) for entry in entries if entry is not None]
        ttft_s = next((ttft_s for ttft_s, _ in said if ttft_s is not None), None)
        tpot_s = next((tpot_s for _, tpot_s in said if tpot_s is not None), None)
        return None if ttft_s is None and tpot_s is None else Slo(ttft_s, tpot_s)
