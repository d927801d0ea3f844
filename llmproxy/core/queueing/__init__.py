"""Who waits, in which order, for how long: the waiting room of a pool."""
