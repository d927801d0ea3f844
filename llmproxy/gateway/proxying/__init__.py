"""Serves one request: the request handler, its attempts, the relay of the answer, and the record at the end."""
