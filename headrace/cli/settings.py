"""Settings of a command, read when they are first needed.

Reading them late keeps `headrace COMMAND --help` working, and fast, with a broken file.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import click

from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.client import Client
    from headrace.config import Option, Settings
    from headrace.tuning import Tuning

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Invocation:
    """Values of the options of every command.

    Attributes:
        config_file: from `--config` or `HEADRACE_CONFIG`; None for the default locations.
        debug: show the traceback of an error.
        given: settings that stand instead of a file's and the environment's.
        serve_process: what `run` and `gateway` serve with; None for `headrace.runtime.process.run`,
            whose parameters it has.
        open_client: opens the client of `infer`; None for one of the configured broker, or of a
            pipeline in this process.
        tuning: of commands that change models; None for `headrace.tuning.TUNING`.
    """

    config_file: Path | None = None
    debug: bool = False
    given: Settings | None = field(default=None, repr=False)
    serve_process: Callable[..., Coroutine[Any, Any, bool]] | None = None
    open_client: Callable[[Settings], AbstractAsyncContextManager[Client]] | None = None
    tuning: Tuning | None = None

    @cached_property
    def settings(self) -> Settings:
        """The settings, read once. Raises `ConfigurationError`."""
        from headrace.config import load_settings

        return self.given or load_settings(self.config_file)

    def settings_with(self, options: Sequence[Option]) -> Settings:
        """Return the settings, overridden by a command's own options.

        Raises:
            ConfigurationError: see `headrace.config.load_settings`.
        """
        from headrace.config import load_settings

        return load_settings(self.config_file, options) if options else self.settings


def invocation(context: click.Context) -> Invocation:
    """Return the invocation of a context; `obj` may also be the settings themselves."""
    root = context.find_root()
    if not isinstance(root.obj, Invocation):
        root.obj = Invocation(given=root.obj)
    return root.obj


def _set_config(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        invocation(context).config_file = value


def _set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from headrace.telemetry.logs import configure_logging

        invocation(context).debug = True
        configure_logging("debug")


def everywhere() -> list[click.Option]:
    """Return new options of every command, which set the fields of `invocation`."""
    return [
        click.Option(
            ["--config"],
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            expose_value=False,
            callback=_set_config,
            help="Settings in TOML.  [env var: HEADRACE_CONFIG; default: ./headrace.toml if it "
            "exists, else built-in settings]",
        ),
        click.Option(
            ["--debug"],
            is_flag=True,
            expose_value=False,
            callback=_set_debug,
            help="Log more, and show the traceback of an error.",
        ),
    ]


def accept_anywhere(command: click.Command) -> None:
    """Let a command, and those of a group, take the root's options as well."""
    if not any(parameter.name == "config" for parameter in command.params):
        command.params += everywhere()
    if isinstance(command, click.Group):
        for each in command.commands.values():
            accept_anywhere(each)


def _warn_on_stderr() -> None:
    """Have warnings written to standard error: what a command prints may be for a program.

    Commands that serve set up the log for operators instead.
    """
    import structlog  # a tenth of a second, which help need not wait for

    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


def pass_settings(function: Callable[Concatenate[Settings, P], T]) -> Callable[P, T]:
    """Give a command the frozen settings as its first argument."""

    @wraps(function)
    def with_settings(*args: P.args, **kwargs: P.kwargs) -> T:
        _warn_on_stderr()
        return function(invocation(click.get_current_context()).settings, *args, **kwargs)

    return with_settings


def pass_invocation(function: Callable[Concatenate[Invocation, P], T]) -> Callable[P, T]:
    """Give a command the invocation, if it has to handle invalid settings itself."""

    @wraps(function)
    def with_invocation(*args: P.args, **kwargs: P.kwargs) -> T:
        _warn_on_stderr()
        return function(invocation(click.get_current_context()), *args, **kwargs)

    return with_invocation


def require_broker(settings: Settings, otherwise: str) -> None:
    """Raise `ConfigurationError` if no broker is configured.

    Args:
        settings: of the command.
        otherwise: why it needs one, or what can be done without one.
    """
    if settings.kafka is None:
        raise ConfigurationError(
            f"kafka.bootstrap_servers: expected a broker, got none; {otherwise}"
        )
