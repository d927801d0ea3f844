"""The `llmproxy` command, and `python -m llmproxy`."""

from llmproxy.cli import main

if __name__ == "__main__":
    main()
