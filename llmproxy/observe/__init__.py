"""Metrics, logs, traces, and the history that the page shows."""
