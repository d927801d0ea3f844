"""Relay workers: further processes that carry bytes, and ask the one process that schedules for every lease."""
