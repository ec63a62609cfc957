"""The command line `headrace`, with one file per command, imported when it is called.

A new command is a module of this package with a click command named `command`, and a line in
`COMMANDS`. It writes results to stdout and messages to stderr, ends with `Exit`, gets its settings
through `headrace.cli.settings.pass_settings`, and raises `HeadraceError`s, which are turned into
clear lines and the right exit code here.
"""

from __future__ import annotations

from headrace.cli.group import COMMANDS, main
from headrace.cli.outcome import Exit

__all__ = ["COMMANDS", "Exit", "main"]
