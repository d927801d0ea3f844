"""The timed soak: the real process under faults, for as long as `python -m benchmarks.soak --minutes N` asks for."""
