"""The vLLM leg: upstream connections, and the side window through which the fleet's state is read."""
