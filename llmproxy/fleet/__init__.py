"""Who the backends are and how they are: registry, discovery, polls, adapters."""
