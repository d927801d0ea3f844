"""The laboratory: traffic replayed against the production scheduler and simulated engines, in virtual time."""
