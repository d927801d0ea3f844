"""Programs for operators: `init`, `doctor`, `shadow`, `batch`, `export`, `usage`, `top`, `explain`, `scale` and
`whatif`.
"""
