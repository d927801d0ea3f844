"""The page that the command line generates: `docs/reference/cli.md`."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

from typer.main import get_command

from llmproxy.cli.commands import app
from llmproxy.cli.flags import FLAGS, OLD_FLAGS, SHOWN
from llmproxy.cli.help import panels

HEAD = """\
# Command line

`make reference` writes this page from the commands.
"""
FLAGS_HEAD = """
Every key of the [configuration](configuration.md) outside lists is a flag of `serve`:
`queue.max_wait_s` is `--queue-max-wait-s`.
`llmproxy serve --help-all` lists all of them. The common ones are above.

#### Other names of flags

| Flag | Key |
| --- | --- |
"""


def page() -> str:
    """The text of `docs/reference/cli.md`."""
    group: Any = get_command(app)
    text = HEAD
    with group.make_context("llmproxy", [], resilient_parsing=True) as ctx:
        for name in group.list_commands(ctx):
            command = group.get_command(ctx, name)
            below = command.make_context(name, [], parent=ctx, resilient_parsing=True)
            usage = " ".join([below.command_path, *command.collect_usage_pieces(below)])
            text += f"\n## llmproxy {name}\n\n```text\n{usage}\n```\n\n{cleandoc(command.help or '')}\n"
            for title, rows in panels(command, below, command.common_panels):
                text += f"\n### {title} of `{name}`\n\n| Name | Meaning |\n| --- | --- |\n"
                text += "".join(f"| `{_cell(names)}` | {_cell(meaning)} |\n" for names, meaning in rows)
            if name == "serve":
                others = [flag for flag in FLAGS if flag.name not in SHOWN.values() and flag not in OLD_FLAGS]
                keys_of = {flag.name: ", ".join(f"`{key}`" for key in flag.keys) for flag in others}
                text += FLAGS_HEAD + "".join(f"| `{flag}` | {keys} |\n" for flag, keys in keys_of.items())
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
