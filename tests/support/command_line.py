"""A way to call the command line as a person would, without their settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli import main

Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Runs `headrace` with these arguments, in an empty directory with no `HEADRACE_*` set.

    `obj` is the command line's `Invocation`, or its settings.
    """
    for name in os.environ:
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda *arguments, obj=None: CliRunner().invoke(main, arguments, obj=obj)
    root.handlers[:] = handlers
    root.setLevel(level)
