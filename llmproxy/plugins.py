"""Names that a plugin imports to register its own policy. This path does not change between releases.

from llmproxy.plugins import FairnessPolicy, fairness_policies

@fairness_policies.register("mine")
class Mine(FairnessPolicy): ...
"""

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Slo, Usage, Verdict
from llmproxy.core.kv_connectors import KvConnector, NotHandedOver, Parameters
from llmproxy.core.kv_connectors import connectors as kv_connectors
from llmproxy.core.placement.policy import NO_CAPACITY, NO_MATCH, NO_MATCH_FOR_MODEL, Placement
from llmproxy.core.placement.policy import presets as placements
from llmproxy.core.queueing.charge import Charge, charges
from llmproxy.core.queueing.fairness import FairnessPolicy
from llmproxy.core.queueing.fairness import policies as fairness_policies
from llmproxy.core.queueing.ordering import Ordering, Rank, orderings
from llmproxy.core.settings import Settings

__all__ = [
    "NO_CAPACITY",
    "NO_MATCH",
    "NO_MATCH_FOR_MODEL",
    "Charge",
    "FairnessPolicy",
    "KvConnector",
    "NoCapacity",
    "NoMatch",
    "NotHandedOver",
    "Ordering",
    "Parameters",
    "Placed",
    "Placement",
    "Rank",
    "Request",
    "Settings",
    "Slo",
    "Usage",
    "Verdict",
    "View",
    "charges",
    "fairness_policies",
    "kv_connectors",
    "orderings",
    "placements",
]
