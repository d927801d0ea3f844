"""Runs: traces through the production scheduler onto simulated engines."""
