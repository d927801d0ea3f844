"""The HTTP side of a simulated replica, as a real vLLM answers."""
