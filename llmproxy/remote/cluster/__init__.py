"""Several proxies that decide as one: one of them schedules for all, and each relays for its own clients."""
