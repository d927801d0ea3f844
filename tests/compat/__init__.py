"""Real clients against the proxy and a simulated replica: `make compat`."""
