"""The HTTP client of the backends: its interface, connections, TLS and name resolution."""
