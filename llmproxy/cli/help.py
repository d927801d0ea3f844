"""The help of the command line in panels, which fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import cleandoc
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

NAMES_COLUMNS_MAX = 27
"""The most columns that the names of an option may take, so that its description fits beside them."""
HELP_ALL = "help_all"
"""A key in `meta` of a click context. If it is set, the help shows every panel, not only the common ones."""


class PanelHelp(TyperCommand):
    """A command whose help groups options by `rich_help_panel`.

    Typer's own panels cut long option names at 80 columns.
    """

    common_panels: tuple[str, ...] = ()  # Panels of the short help, in order. Empty: all panels.

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's signature
        _print_help(self, ctx, () if ctx.meta.get(HELP_ALL) else self.common_panels)


class PanelHelpGroup(TyperGroup):
    """A group of commands whose help has panels."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's signature
        console = _print_help(self, ctx, ())
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        _print_panel(
            console, "Commands", [(name, command.get_short_help_str(100)) for name, command in named if command]
        )


Rows = list[tuple[str, str]]


def panels(command: TyperCommand | TyperGroup, ctx: Any, only: tuple[str, ...] = ()) -> list[tuple[str, Rows]]:
    """Returns (title, rows) of each help panel. A row has the names and the description of a visible parameter.

    `only` selects and orders the panels.
    """

    def panel(parameter: Any) -> tuple[int, str]:
        name = "Arguments" if isinstance(parameter, TyperArgument) else parameter.rich_help_panel or "Options"
        order = only.index(name) if name in only else {"Arguments": 0, "Options": 1}.get(name, 2)
        return order, name

    found: list[tuple[str, Rows]] = []
    for (_, name), parameters in groupby(sorted(command.get_params(ctx), key=panel), key=panel):
        records = filter(None, (one.get_help_record(ctx) for one in parameters))
        # The library adds the type of an argument in angle brackets.
        rows = [(names.partition(" <")[0], " ".join(meaning.split())) for names, meaning in records]
        if rows and (not only or name in only):
            found.append((name, rows))
    return found


def _print_help(command: TyperCommand | TyperGroup, ctx: Any, only: tuple[str, ...]) -> Console:
    console = Console(highlight=False)
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    console.print(Text(f"Usage: {usage}\n", "bold"))
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        console.print(Text(" ".join(paragraph.split()) + "\n"))
    found = panels(command, ctx, only)
    beside = all(len(names) <= NAMES_COLUMNS_MAX for _, rows in found for names, _ in rows)
    for name, rows in found:
        _print_panel(console, name, rows, beside=beside)
    return console


def _print_panel(console: Console, title: str, rows: Iterable[tuple[str, str]], *, beside: bool = True) -> None:
    body: RenderableType
    if beside:
        body = Table.grid(padding=(0, 1))
        body.add_column(width=NAMES_COLUMNS_MAX)
        for names, meaning in rows:
            body.add_row(Text(names, "cyan"), Text(meaning))
    else:
        body = Group(
            *(part for names, meaning in rows for part in (Text(names, "cyan"), Padding(Text(meaning), (0, 0, 0, 4))))
        )
    console.print(Panel(body, title=title, title_align="left", border_style="dim"))
