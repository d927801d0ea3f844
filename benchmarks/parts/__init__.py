"""The cost of single parts of the code: no processes, no network, one core."""
