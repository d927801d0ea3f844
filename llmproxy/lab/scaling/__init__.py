"""What autoscalers follow, and the rules of Kubernetes' HPA by which they do."""
