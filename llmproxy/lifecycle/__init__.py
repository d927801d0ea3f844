"""The life of the process: signals, listening sockets, a successor, open files."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Of the garbage collector, for a process with many requests: they are in no reference cycle."""
