"""Manifests for autoscalers that follow the `need` in `/scale`: KEDA with and without Prometheus, and a plain HPA."""

from __future__ import annotations

from textwrap import indent

BEHAVIOUR = """\
scaleUp:
  # The need requires no smoothing. Without this line an HPA ignores a need within a tenth of the present replicas,
  # which is a whole replica from ten replicas on.
  tolerance: "0"
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 15}
    - {type: Pods, value: 4, periodSeconds: 15}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
"""

KEDA = f"""\
# KEDA asks llmproxy itself: no Prometheus is needed. Change the names, the namespace and MODEL.
# The secret has the admin key; without one on the proxy, leave out authMode and authenticationRef.
apiVersion: keda.sh/v1alpha1
kind: TriggerAuthentication
metadata: {{name: llmproxy-scale}}
spec:
  secretTargetRef:
    - {{parameter: token, name: llmproxy-admin, key: key}}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {{name: vllm}}
spec:
  scaleTargetRef: {{name: vllm}}
  minReplicaCount: 1
  maxReplicaCount: 8
  # Seconds until KEDA asks for the first replica if there is none.
  pollingInterval: 5
  triggers:
    - type: metrics-api
      metricType: AverageValue
      metadata:
        url: http://llmproxy.default.svc:9090/scale/MODEL
        valueLocation: need
        targetValue: "1"
        authMode: bearer
      authenticationRef: {{name: llmproxy-scale}}
  # The present replicas stay while the proxy does not answer, or does not know the need yet (503).
  fallback: {{failureThreshold: 3, replicas: 1, behavior: currentReplicasIfHigher}}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
{indent(BEHAVIOUR, "        ")}"""

KEDA_PROMETHEUS = f"""\
# KEDA asks Prometheus. Change the names, the address of Prometheus and MODEL.
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {{name: vllm}}
spec:
  scaleTargetRef: {{name: vllm}}
  minReplicaCount: 1
  maxReplicaCount: 8
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: http://prometheus.monitoring.svc:9090
        query: max(max_over_time(llmproxy_scale_need_replicas{{pool="MODEL"}}[30s]))
        threshold: "1"
        # A missing series does not mean zero.
        ignoreNullValues: "false"
  fallback: {{failureThreshold: 3, replicas: 1, behavior: currentReplicasIfHigher}}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
{indent(BEHAVIOUR, "        ")}"""

HPA = f"""\
# A plain HPA, where an adapter serves the metric to it (prometheus-adapter or another one).
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {{name: vllm}}
spec:
  scaleTargetRef: {{apiVersion: apps/v1, kind: Deployment, name: vllm}}
  minReplicas: 1
  maxReplicas: 8
  metrics:
    - type: External
      external:
        metric:
          name: llmproxy_scale_need_replicas
          selector: {{matchLabels: {{pool: MODEL}}}}
        target: {{type: AverageValue, averageValue: "1"}}
  behavior:
{indent(BEHAVIOUR, "    ")}"""


def files() -> dict[str, str]:
    """Returns the manifests: file name -> text."""
    return {"keda.yaml": KEDA, "keda-prometheus.yaml": KEDA_PROMETHEUS, "hpa.yaml": HPA}
