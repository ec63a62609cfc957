"""Group of commands whose modules are imported when they are called."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from typing import Any

import click

from headrace.cli.settings import accept_anywhere


class LazyGroup(click.Group):
    """A group with commands in separate modules, besides those that are added to it.

    Its commands take the options of every command (`headrace.cli.settings.everywhere`), so that
    those may come before or after a command's name.

    Args:
        modules: by command name the module that has it as `command`, and its line of help, which is
            shown without importing the module.
    """

    def __init__(self, *args: Any, modules: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *(name for name in self._modules if name not in self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._modules and cmd_name not in self.commands:
            # Imported objects live as long as the process: to look for garbage among them finds
            # none, and takes about 5 % of a start.
            gc.disable()
            try:
                module = importlib.import_module(self._modules[cmd_name][0])
            finally:
                gc.enable()
            command: click.Command | None = module.command
        else:
            command = super().get_command(ctx, cmd_name)
        if command is not None:
            accept_anywhere(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any."""
        lines = [(name, each.get_short_help_str(90)) for name, each in self.commands.items()]
        lines += [(name, text) for name, (_, text) in self._modules.items()]
        with formatter.section("Commands"):
            formatter.write_dl(lines)
