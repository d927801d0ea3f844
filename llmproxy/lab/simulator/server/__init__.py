"""A simulated vLLM server without its sockets: options, checked requests, paced engine, metrics, faults."""
