"""Measurements of llmproxy; `README.md` beside this file says how each is run and read."""

import os

# What is measured here is not to be remembered for the proxy of whoever measures.
os.environ.setdefault("LLMPROXY_STATE_FILE", "none")
