"""The recent past for the page and `top`: numbers of the last day, the last requests, and the last events."""
