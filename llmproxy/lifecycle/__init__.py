"""The life of a process: signals, listening sockets, the successor, open files. Requests are handled elsewhere."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Garbage collector thresholds. They are high because requests are in no reference cycles."""
