"""The asyncio side of scheduling: the dispatcher, leases, attempts, limits shared through Valkey."""
