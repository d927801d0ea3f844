"""Benches of the laboratory, in virtual time: workloads under every policy, autoscaling, and checks of the model."""
