"""Placement policies of runs: this proxy's and other routers' policies, an oracle, and analytic bounds."""
