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

`make reference` writes this page from the commands. Every command also has `--help`.
"""
FLAGS_HEAD = """
Every other key of the [configuration](configuration.md) outside lists is a flag too: `llmproxy serve --help-all`.

### Other names of flags

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
            text += f"\n## llmproxy {name}\n\n{cleandoc(command.help or '')}\n"
            found = [row for _, rows in panels(command, below, command.common_panels) for row in rows]
            cells = [f"| `{_cell(names)}` | {_cell(meaning)} |\n" for names, meaning in found if names != "--help"]
            text += "\n| Name | Meaning |\n| --- | --- |\n" * bool(cells) + "".join(cells)
            if name == "serve":
                others = [flag for flag in FLAGS if flag.name not in SHOWN.values() and flag not in OLD_FLAGS]
                keys_of = {flag.name: ", ".join(f"`{key}`" for key in flag.keys) for flag in others}
                text += FLAGS_HEAD + "".join(f"| `{flag}` | {keys} |\n" for flag, keys in keys_of.items())
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
