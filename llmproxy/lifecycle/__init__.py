"""The life of a process: signals, listening sockets, the successor, open files. Requests are handled elsewhere."""

# High, because requests are in no reference cycles. But the second generation is collected often, because a collection
# stops the event loop for up to 2 µs for each young object, and thousands of streams may begin at once.
GC_THRESHOLDS = (10_000, 1, 1000)
