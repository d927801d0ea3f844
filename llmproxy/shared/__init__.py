"""What proxies that know nothing of each other share: counts in a Valkey or Redis."""
