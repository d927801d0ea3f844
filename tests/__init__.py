"""Tests of llmproxy."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Tests must not change the state file of the user who runs them, and processes that a test starts keep nothing for
# those of another test, which may have the same ports.
os.environ["LLMPROXY_STATE_FILE"] = "none"
