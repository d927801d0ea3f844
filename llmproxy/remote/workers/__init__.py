"""Relay workers: processes that relay requests and answers. The scheduler process grants each of their leases."""
