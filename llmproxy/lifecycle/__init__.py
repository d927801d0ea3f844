"""The life of a process: signals, listening sockets, the successor, open files. Requests are handled elsewhere."""

# The thresholds of Python's garbage collector. The first is high, because requests are in no reference cycles. The
# second is low, because a collection stops the event loop for up to 2 µs for each young object, and thousands of
# streams may begin at once.
GC_THRESHOLDS = (10_000, 1, 1000)
