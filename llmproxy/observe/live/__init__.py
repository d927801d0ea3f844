"""The recent past for the page and `top`: figures of the last day, recent requests and recent log events."""
