"""The command line: commands, flags, help."""

import sys

from llmproxy.lifecycle import early_signals


def main() -> None:
    """Run the command line. `serve` minds signals before anything else is imported."""
    if sys.argv[1:2] == ["serve"]:
        early_signals.remember()
        # Whatever it says from now on, of a wrong configuration too, must not wait for somebody to read it.
        from llmproxy.telemetry.logs import write_by_thread

        write_by_thread()
    elif sys.argv[1:2] == ["demo"]:
        early_signals.end_at_once()
    from llmproxy.cli.commands import main as command

    command()
