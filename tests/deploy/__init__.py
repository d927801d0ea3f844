"""The chart and the bases of kustomize in `deploy/`, rendered and judged without a cluster."""

from tests import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "llmproxy"
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
KUSTOMIZE = DEPLOY / "kustomize"
