"""The side of the clients: HTTP, bodies, identity, relaying, pages for operators. It knows no policy."""
