"""The HTTP client of the backends: connections, TLS, name resolution."""
