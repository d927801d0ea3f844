"""The timed soak: the real process under faults, for the N minutes of `python -m benchmarks.soak --minutes N`."""
