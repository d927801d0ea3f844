"""What is known of each backend: load, batch limit, health, models."""
