"""What all tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

pytest_plugins = ["tests.support.broker", "tests.support.command_line", "tests.support.go_tools"]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a test, or a command that it calls, has set up for logging."""
    root = logging.getLogger()
    level = root.level
    levels = {name: logger.level for name, logger in _loggers()}
    yield
    for name, logger in _loggers():
        logger.setLevel(levels.get(name, logging.NOTSET))
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest's own are of other types
            root.removeHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()


def _loggers() -> list[tuple[str, logging.Logger]]:
    """Return the loggers that exist by now, with their names."""
    known = logging.root.manager.loggerDict.items()
    return [(name, logger) for name, logger in known if isinstance(logger, logging.Logger)]
