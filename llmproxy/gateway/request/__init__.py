"""Reads requests: bodies, prefix hashes, tenant, band and flow."""
