"""One request from its body to its last byte: the request handler, attempts, the relay, the record of its end."""
