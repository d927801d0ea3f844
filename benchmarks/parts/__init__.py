"""The CPU cost of single parts of the code, without processes and network, on one core."""
