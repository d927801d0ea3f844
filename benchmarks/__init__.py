"""Measurements of llmproxy; `README.md` beside this file says how each is run and read."""
