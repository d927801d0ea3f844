"""Every scheduling decision. It imports no loop, clock, network, log or metric.

`now` is an argument and the next wake-up a return value, so the same objects run in tests, in the simulator and in
production. One object (`Scheduler`) changes scheduling state; policies see frozen views.
"""
