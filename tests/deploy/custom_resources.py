"""Strict schemas for kinds that are no part of Kubernetes: the fields that `deploy/` uses, by their documentation.

A field that is not here is an error, so that a new one is looked up by whoever writes it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object", "additionalProperties": False, "properties": properties, "required": required.split(),
    }  # fmt: skip


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
    return _object(
        "apiVersion kind metadata spec", apiVersion={"const": api_version}, kind={"const": kind}, metadata=metadata,
        spec=spec,
    )  # fmt: skip


_POLICY = _object("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT)
_RULES = _object(stabilizationWindowSeconds=COUNT, tolerance=TEXT, policies=_list(_POLICY))
_TRIGGER = _object(
    "type metadata",
    type={"const": "metrics-api"},
    metricType={"enum": ["AverageValue", "Value"]},
    # KEDA reads them as text.
    metadata=_object(
        "url valueLocation targetValue", url={"type": "string", "pattern": "^https?://[^ ]+:[0-9]+/"},
        valueLocation=TEXT, targetValue=TEXT, authMode={"enum": ["apiKey", "basic", "bearer", "tls"]},
        aggregateFromKubeServiceEndpoints={"enum": ["true", "false"]},
        aggregationType={"enum": ["average", "sum", "max", "min"]},
    ),
    authenticationRef=_object("name", name=TEXT),
)  # fmt: skip
_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount={"type": "integer", "minimum": 1},
    pollingInterval=COUNT,
    triggers=_list(_TRIGGER),
    fallback=_object(
        "failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT,
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(behavior=_object(scaleUp=_RULES, scaleDown=_RULES)),
    ),
)  # fmt: skip
_AUTHENTICATION = _object(secretTargetRef=_list(_object("parameter name key", parameter=TEXT, name=TEXT, key=TEXT)))
_POD_MONITOR = _object(
    "selector podMetricsEndpoints",
    selector=_object("matchLabels", matchLabels=TEXTS),
    podMetricsEndpoints=_list(
        _object(
            port=TEXT, path=TEXT, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
            scheme={"enum": ["http", "https"]},
        )
    ),
)  # fmt: skip
_HTTP_ROUTE = _object(
    "parentRefs rules",
    parentRefs=_list(_object("name", name=TEXT, namespace=TEXT, sectionName=TEXT, port=COUNT)),
    hostnames=_list(TEXT),
    rules=_list(
        _object(
            backendRefs=_list(_object("name port", name=TEXT, port=COUNT)),
            timeouts=_object(request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        )
    ),
)
SCHEMAS: dict[str, dict[str, Schema]] = {
    "keda.sh": {
        "ScaledObject": _resource("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
        "TriggerAuthentication": _resource("keda.sh/v1alpha1", "TriggerAuthentication", _AUTHENTICATION),
    },
    "monitoring.coreos.com": {"PodMonitor": _resource("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR)},
    "gateway.networking.k8s.io": {"HTTPRoute": _resource("gateway.networking.k8s.io/v1", "HTTPRoute", _HTTP_ROUTE)},
}
"""Group -> kind -> schema."""
