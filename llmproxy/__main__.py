"""`python -m llmproxy` is the `llmproxy` command."""

from llmproxy.cli import main

main()
