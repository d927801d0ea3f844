"""The state of each backend: load, batch limit, adapters, health and outlier detection."""
