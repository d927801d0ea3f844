"""Workloads under every policy: their definition, their runs and their tables."""
