"""Grants leases to other processes: relay workers on this machine, cluster members on others."""
