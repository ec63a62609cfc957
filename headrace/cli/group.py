"""The root command: options of all commands, the commands by name, and error handling."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

import click

from headrace import __version__
from headrace.cli.lazy_group import LazyGroup
from headrace.cli.outcome import Exit, Unsuccessful, explain, leaves
from headrace.cli.output import drop_unwritten_output, open_closed_streams, say
from headrace.cli.settings import everywhere, invocation

COMMANDS = {
    "demo": "Show all of it on real files, in one process; needs no broker.",
    "run": "Serve: run all four services, or some of them, until a signal.",
    "gateway": "Open a gateway to a broker: the Open Inference Protocol, HTTP and gRPC.",
    "infer": "Send one request to a model and print the answer.",
    "topics": "Create, describe or check Headrace's topics on the broker.",
    "offsets": "Show or reset how far each source partition is answered.",
    "models": "List, check, pack or copy models, and change which ones are served.",
    "dlq": "List, show, send again and export dead letters.",
    "replay": "Count, save or send recorded requests again; compare models, simulate limits.",
    "bench": "Put load on a model; show latency, and what binds.",
    "top": "Show what running processes do: rates, waits, batches, errors.",
    "doctor": "Find what is wrong, and say how to fix it.",
}
"""Help line of each command; the module of the same name has it as `command`."""


class CommandLine(LazyGroup):
    """The root command, which reports errors."""

    def main(self, *args: Any, **extra: Any) -> Any:
        open_closed_streams()
        try:
            return super().main(*args, **extra)
        except Exception as error:  # of the output of help as well, which comes before `invoke`
            if not _is_of_full_disk(error):
                raise
            with suppress(OSError):  # standard error may be on that disk
                say(f"headrace: cannot write: {os.strerror(errno.ENOSPC)}", err=True)
            drop_unwritten_output()
            sys.exit(Exit.FAILED)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Unsuccessful:
            ctx.exit(Exit.FAILED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            say("headrace: interrupted", err=True)
            ctx.exit(Exit.INTERRUPTED)
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


def _is_of_full_disk(error: Exception) -> bool:
    return all(isinstance(each, OSError) and each.errno == errno.ENOSPC for each in leaves(error))


@click.group(
    cls=CommandLine,
    modules={name: (f"headrace.cli.{name}", text) for name, text in COMMANDS.items()},
    params=everywhere(),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="headrace", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Serve models behind Kafka topics: every request record gets an answer record, in time.

    Without a broker in the settings, the log is one in memory, inside the command's own process.
    Commands that need a log shared by several processes, or one that lasts, refuse to run then.
    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, or a topic or store is missing,
    3 stopped before all was answered and committed, 130 interrupted.
    """
    if not invocation(context).debug:
        # A command reports in one line what a library would log in ten; `run` sets up the log for
        # operators.
        logging.getLogger().addHandler(logging.NullHandler())
