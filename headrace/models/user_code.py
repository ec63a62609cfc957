"""Loading of Python files that a model brings with it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigurationError


def load_module(path: Path) -> ModuleType:
    """Run a file as a module of its own, which is not entered into `sys.modules`.

    Raises:
        ConfigurationError: there is no such file, or it raises; the message has the exception's.
    """
    name = "headrace_model_" + re.sub(r"\W", "_", str(path.with_suffix("")))
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigurationError(f"{path}: expected a Python file, got none")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code may raise anything
        raise ConfigurationError(f"{path}: {describe(error)}") from error
    return module


def load_attribute(path: Path, name: str) -> Any:
    """A callable of a user's file. Raises `ConfigurationError`, see `load_module`."""
    found = getattr(load_module(path), name, None)
    if not callable(found):
        raise ConfigurationError(f"{path}: expected {name}, got none")
    return found


def describe(error: BaseException) -> str:
    """An exception in one line: its class and its text."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an error may even fail to say what it is
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
