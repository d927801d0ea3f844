"""A simulated vLLM replica: a pure engine model and the HTTP server around it."""
