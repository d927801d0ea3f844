"""The laboratory: traces replayed in virtual time, the simulated vLLM, the demo. Production never imports it."""
