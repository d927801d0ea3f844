"""A cluster of real processes, and what breaks in it under load."""
