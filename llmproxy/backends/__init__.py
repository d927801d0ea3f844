"""The list of backends and their state: registry, discovery, polls, adapters. It never sees a request."""
