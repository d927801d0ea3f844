"""The laboratory's standing comparison: `workloads`, what runs them, keeps the runs and prints them."""
