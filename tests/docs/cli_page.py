"""The page that the command line generates: `docs/reference/cli.md`."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

from typer.main import get_command

from llmproxy.cli.commands import app
from llmproxy.cli.flags import ALIASES, COMMON
from llmproxy.cli.help import panels

HEAD = """\
# Command line

`make reference` writes this page from the commands. Every command also has `--help`.
"""
FLAGS_HEAD = """
`llmproxy serve --help` shows the most used flags. [Configuration](configuration.md) has the meaning of each key.

### Other names of flags

| Flag | Key |
| --- | --- |
"""

KEYS = {flag for flags in COMMON.values() for flag in flags}
"""Flags of `serve` that the page leaves out, because `docs/reference/configuration.md` explains their keys."""


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
            left_out = {"--help", *(KEYS if name == "serve" else ())}
            found = [(names, meaning) for names, meaning in found if names.partition(" ")[0] not in left_out]
            cells = [f"| `{_cell(names)}` | {_cell(meaning)} |\n" for names, meaning in found]
            text += "\n| Name | Meaning |\n| --- | --- |\n" * bool(cells) + "".join(cells)
            if name == "serve":
                keys_of = {flag: ", ".join(f"`{key}`" for key in keys) for flag, keys in ALIASES.items()}
                text += FLAGS_HEAD + "".join(f"| `{flag}` | {keys} |\n" for flag, keys in keys_of.items())
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
