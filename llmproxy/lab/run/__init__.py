"""One run: a trace through the production scheduler onto simulated engines."""
