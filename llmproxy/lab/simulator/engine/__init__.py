"""The engine of a vLLM replica as a model: pure, in virtual time."""
