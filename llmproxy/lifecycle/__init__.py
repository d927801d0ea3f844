"""The life of a process: signals, listening sockets, the successor, open files. Requests are handled elsewhere."""

GC_THRESHOLDS = (10_000, 1, 1000)
"""Garbage collector thresholds. They are high because requests are in no reference cycles.

A pass of the second generation is frequent, because it stops the event loop for up to 2 µs for each young object, and
thousands of streams may begin at once.
"""
