"""Metrics, logs and the decision log. Nothing here decides anything."""
