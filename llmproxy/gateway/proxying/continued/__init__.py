"""Continues streams that break at one backend on another backend."""
