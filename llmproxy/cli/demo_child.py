"""`python -m llmproxy.cli.demo_child KEYS ARGS`: `llmproxy ARGS`, with a button on its page for each of KEYS."""

from __future__ import annotations

import sys

from llmproxy.cli.child import run
from llmproxy.lab.demo.buttons import add

if __name__ == "__main__":
    add(sys.argv.pop(1))
    run()
