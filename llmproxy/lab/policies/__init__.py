"""What a run can be placed by: our policies, other routers', an oracle, analytic bounds."""
