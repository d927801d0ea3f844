"""Measurements of llmproxy. README.md has a table of them."""
