"""The waiting room of a pool: admission, order, limits and deadlines of its requests."""
