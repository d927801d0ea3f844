"""Streams that break, and go on at another backend."""
