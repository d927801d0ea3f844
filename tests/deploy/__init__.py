"""The chart and the bases of kustomize in `deploy/`, rendered and judged without a cluster."""

from tests import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "llmproxy"
KUSTOMIZE = DEPLOY / "kustomize"
