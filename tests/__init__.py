"""Tests of llmproxy."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What is tried here, by pytest or without it, is not to be remembered for the proxy of whoever tries.
os.environ.setdefault("LLMPROXY_STATE_FILE", "none")
