"""The asyncio side of scheduling: the dispatcher, leases, attempts."""
