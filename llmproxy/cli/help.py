"""The help of the command line in panels: flags of `serve` by section of the configuration, whole at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import cleandoc
from itertools import groupby
from typing import Any

from pydantic.fields import FieldInfo
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

LAST = "Other names"
"""The panel of flags that say the same as others."""


class PanelHelp(TyperCommand):
    """A command whose flags stand under the names of their `rich_help_panel`, each above what it does.

    The library's own panels have the flags in a column, which cuts the long ones at 80 columns.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's signature
        """Print the help, in colours where the terminal has them."""
        _print_help(self, ctx)


class PanelHelpGroup(TyperGroup):
    """A group of commands with such a help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's signature
        """Print the help, and what each command is for."""
        console = _print_help(self, ctx)
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        _print_panel(
            console, "Commands", [(name, command.get_short_help_str(100)) for name, command in named if command]
        )


def with_default(field: FieldInfo) -> str:
    """What a key does, and what it is unless given."""
    return f"{field.description}" + (f" [{field.default}]" if isinstance(field.default, int | float | str) else "")


def _print_help(command: TyperCommand | TyperGroup, ctx: Any) -> Console:
    console = Console(highlight=False)
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    console.print(Text(f"Usage: {usage}\n", "bold"))
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        console.print(Text(" ".join(paragraph.split()) + "\n"))
    for (_, name), parameters in groupby(sorted(command.get_params(ctx), key=_panel), key=_panel):
        _print_panel(console, name, [parameter.get_help_record(ctx) for parameter in parameters])
    return console


def _panel(parameter: Any) -> tuple[int, str]:
    """Arguments, what has no section, the sections by name, and what else the same is called."""
    name = "Arguments" if isinstance(parameter, TyperArgument) else parameter.rich_help_panel or "Options"
    return {"Arguments": 0, "Options": 1, LAST: 3}.get(name, 2), name


def _print_panel(console: Console, title: str, records: Iterable[tuple[str, str] | None]) -> None:
    rows = [
        row
        for names, told in filter(None, records)
        for row in (Text(names, "cyan"), Padding(Text(" ".join(told.split())), (0, 0, 0, 4)))
    ]
    console.print(Panel(Group(*rows), title=title, title_align="left", border_style="dim"))
