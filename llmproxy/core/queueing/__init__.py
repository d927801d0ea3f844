"""The waiting room of a pool: which requests wait, in which order, for how long."""
