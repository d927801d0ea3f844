"""The client of the backends: the port that the relay knows, connections, TLS, names."""
