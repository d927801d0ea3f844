"""Programs for operators: `top`, `explain`, `scale` and `whatif` in a terminal, `export` and `shadow`."""
