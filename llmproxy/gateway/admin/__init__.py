"""Pages for the people who run the proxy."""
