"""The client leg and the byte path."""
