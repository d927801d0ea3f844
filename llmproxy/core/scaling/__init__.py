"""How many replicas the work of a pool needs: learned from what arrives and how it is served.

`curve` learns the time of a step, `mix` what arrives, `observer` watches one pool, `need` puts a number on it.
"""
