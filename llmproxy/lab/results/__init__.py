"""What comes of a run: sums, tables, plots, the report."""
