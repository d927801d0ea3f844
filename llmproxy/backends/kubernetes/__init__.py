"""Backends that are pods of a Kubernetes cluster, as its API server reports them."""
