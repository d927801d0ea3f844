"""The bytes of a request become facts: parsed body, prefix hashes, tenant, band, flow."""
