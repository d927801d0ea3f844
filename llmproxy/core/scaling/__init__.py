"""The number of replicas that a pool needs, learned from its arrivals and its served requests.

`mix` learns the arrivals, `curve` the time of an engine step. `observer` collects both for a pool, and `need` computes
the number.
"""
