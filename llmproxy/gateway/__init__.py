"""The client side: HTTP, bodies, identity, relaying, pages for operators. It contains no scheduling policy."""
