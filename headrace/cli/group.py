"""The root command: options for all commands, the commands by name, and their errors."""

from __future__ import annotations

import importlib
import logging
import traceback
from pathlib import Path
from typing import Any

import click

from headrace import __version__
from headrace.cli.outcome import Exit, Unsuccessful, explain
from headrace.cli.output import say
from headrace.cli.settings import invocation

COMMANDS = {
    "demo": "Show all of it on real files, in one process; needs no broker.",
    "run": "Serve: run all four services, or some of them, until a signal.",
    "infer": "Send one request to a model and print the answer.",
    "topics": "Create, describe or check Headrace's topics on the broker.",
    "offsets": "Show or reset how far each source partition is answered.",
    "models": "List, describe or check the models in the repository.",
    "dlq": "List, show, send again and export dead letters.",
    "replay": "Send recorded requests again, count or save them.",
    "bench": "Put load on a model; show latency, and what binds.",
    "top": "Show what running processes do: rates, waits, batches, errors.",
    "doctor": "Find what is wrong, and say how to mend it.",
}
"""Each command and its line of help; the module of the same name has it as `command`."""


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called, and ends errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"headrace.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Unsuccessful:
            ctx.exit(Exit.FAILED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            outcome = explain(error)
            if outcome is None:
                raise
            code, lines = outcome
            if invocation(ctx).debug:
                click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
            for line in lines:
                say(f"headrace: {line}", err=True)
            ctx.exit(code)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="HEADRACE_CONFIG",
    show_envvar=True,
    metavar="FILE",
    help="Settings in TOML.  [default: ./headrace.toml if it exists, else built-in settings]",
)
@click.option("--debug", is_flag=True, help="Log more, and show the traceback of an error.")
@click.version_option(__version__, prog_name="headrace", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context, config_file: Path | None, debug: bool) -> None:
    """Serve models behind Kafka topics: every request record gets an answer record, in time.

    Without a broker in the settings, the log is one in memory, inside the command's own process.
    Exit codes: 0 done, 1 failed, 2 wrong usage or settings.
    """
    called = invocation(context)
    called.config_file = config_file
    called.debug = debug
    if debug:
        from headrace.telemetry.logs import configure_logging

        configure_logging("debug")
    else:
        # A command says in one line of its own what a library would log in ten; `run` sets up
        # the log that operators read.
        logging.getLogger().addHandler(logging.NullHandler())
