"""Several proxies that schedule as one. A leader schedules for all members, and each member relays for its own
clients.
"""
