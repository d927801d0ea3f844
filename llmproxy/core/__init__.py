"""The scheduling core. It imports no event loop, clock, network, log or metric.

`now` is an argument and the next wake-up a return value, so the same objects run in tests, in the simulator and in
production. Policies see immutable views of the scheduling state, and cannot change it.
"""
