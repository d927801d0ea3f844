"""A simulated vLLM replica: a pure engine model and the HTTP face that a real server shows of it."""
