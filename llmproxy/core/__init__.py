"""Every scheduling decision, and nothing else: no loop, clock, network, logs or metrics.

`now` is an argument and the next wake-up a return value, so the same objects run in tests, in the simulator and in
production. One object (`Scheduler`) changes scheduling state; policies see frozen views.
"""
