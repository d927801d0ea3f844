"""What single parts of the code cost: no processes, no network, one core."""
