"""Serves a request on two backends: the first computes the prompt (prefill), the second the answer (decode)."""
