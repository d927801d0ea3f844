"""Leases from another process: relay workers on this machine, cluster members on others."""
