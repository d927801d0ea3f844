"""What the process remembers for people who look: the last day in numbers, the last requests, the last events."""
