"""The recent past for the page and `top`: figures of the last day, the last requests, and the last log events."""
