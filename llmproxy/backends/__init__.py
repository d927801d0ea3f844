"""The list of backends and their state: registry, discovery, polls, adapters. No request passes through it."""
