"""Small fleets of real processes at their defaults: `python -m benchmarks.small_fleets`, also `make live`."""
