"""Several proxies that schedule as one: a leader schedules, and each member relays for its own clients."""
