"""Metrics, logs, traces, and the history that the page shows. It decides nothing."""
