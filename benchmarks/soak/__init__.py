"""An hour of load with a fault every minute: `python -m benchmarks.soak`."""
