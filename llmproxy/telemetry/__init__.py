"""Metrics and logs: what is told of the requests and of the fleet. Nothing here decides anything."""
