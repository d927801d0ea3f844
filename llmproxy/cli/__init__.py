"""The command line: commands, flags, help."""

import sys

from llmproxy.lifecycle import early_signals


def main() -> None:
    """Runs the command line. `serve` installs its signal handlers before it imports anything else."""
    if sys.argv[1:2] == ["serve"]:
        early_signals.remember()
        # From here on no output may block on a slow reader, not even the message about a wrong configuration.
        from llmproxy.observe.logs import write_by_thread

        write_by_thread()
    elif sys.argv[1:2] == ["demo"]:
        early_signals.end_at_once()
    from llmproxy.cli.commands import main as command

    command()
