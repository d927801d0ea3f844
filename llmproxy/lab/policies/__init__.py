"""The policies of runs: placements of this proxy and of other routers, an oracle, and analytic bounds."""
