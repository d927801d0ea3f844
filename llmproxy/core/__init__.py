"""The scheduling core. It imports no event loop, clock, network, log or metric.

`now` is an argument and the next wake-up a return value, so the same objects run in tests, in the simulator and in
production. Only the `Scheduler` changes scheduling state; policies see immutable views.
"""
