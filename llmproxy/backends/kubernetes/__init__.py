"""Backends that are pods of a Kubernetes cluster."""
