"""Results of runs: sums, tables, plots and the report."""
