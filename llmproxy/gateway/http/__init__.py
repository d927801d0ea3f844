"""HTTP/1 on the client's side: connections, TLS, limits, header fields, errors, routes."""
