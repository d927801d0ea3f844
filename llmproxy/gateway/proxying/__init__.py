"""One request from its body to its last byte: attempts, relay, what is told at the end."""
