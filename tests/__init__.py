"""Tests of llmproxy."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Tests must not change the state file of the user who runs them.
os.environ.setdefault("LLMPROXY_STATE_FILE", "none")
