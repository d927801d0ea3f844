"""HTTP/1 with clients: connections, TLS, limits, header fields, errors, routes."""
