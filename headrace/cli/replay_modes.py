"""`headrace replay` with a flag that makes another command of it, such as `--compare`."""

from __future__ import annotations

import importlib
from typing import Any

import click

MODES = {
    "--compare": "headrace.cli.replay_compare",
    "--simulate": "headrace.cli.replay_simulate",
}
"""Each flag, and the module that has its command as `command`."""


class ReplayCommand(click.Command):
    """A command that gives way to another one where its flag is among the arguments.

    The modes share what is read, and little else; with one command for all, its help would be a
    list of options most of which do not go together.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Click calls it, before it invokes the context's command."""
        for flag, module in MODES.items():
            if flag in args:
                mode: click.Command = importlib.import_module(module).command
                rest = [argument for argument in args if argument != flag]
                return mode.make_context(f"{info_name} {flag}", rest, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
