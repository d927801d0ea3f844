"""The life of a process: signals, listening sockets, a successor, open files. It never sees a request."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Of the garbage collector, for a process with many requests: they are in no reference cycle."""
