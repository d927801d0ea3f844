"""The `llmproxy` command, and `python -m llmproxy`."""

import sys

from llmproxy import early


def main() -> None:
    """Run the command line. Signals to one that is going to serve are minded before all else is even read."""
    if sys.argv[1:2] == ["serve"]:
        early.remember()
        # Whatever it says from now on, of a wrong configuration too, must not wait for somebody to read it.
        from llmproxy.telemetry.logs import write_by_thread

        write_by_thread()
    elif sys.argv[1:2] == ["demo"]:
        early.end_at_once()
    from llmproxy.cli import main as command

    command()


if __name__ == "__main__":
    main()
