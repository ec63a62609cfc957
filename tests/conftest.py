"""What all tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

pytest_plugins = ["tests.support.broker", "tests.support.command_line", "tests.support.go_tools"]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a test, or a command that it calls, has set up for logging."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest's own are of other types
            root.removeHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()
