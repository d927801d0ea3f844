"""The `llmproxy` command, and `python -m llmproxy`."""

import sys

from llmproxy import early


def main() -> None:
    """Run the command line. Signals to one that is going to serve are minded before all else is even read."""
    if sys.argv[1:2] == ["serve"]:
        early.remember()
    from llmproxy.cli import main as command

    command()


if __name__ == "__main__":
    main()
