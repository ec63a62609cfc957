"""Loading of Python files that a model brings with it.

A user's code may raise anything, `SystemExit` and `KeyboardInterrupt` included, and it may never
return. None of that may end the process, or hold it up for longer than the model allows.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from headrace.errors import ConfigurationError, HeadraceError

T = TypeVar("T")

LONGEST_TEXT = 2000
"""Characters of an exception's text that are kept."""


class Interrupted(BaseException):
    """Raised in a thread whose code takes too long; no `except Exception` catches it."""


class StillImporting(ConfigurationError):
    """A file has not been imported within its limit.

    Attributes:
        thread: on which the import may still be running.
    """

    def __init__(self, message: str, thread: threading.Thread) -> None:
        super().__init__(message)
        self.thread = thread


def run_bounded(work: Callable[[], T], path: Path, limit_s: float) -> T:
    """Run a user's code on a thread of its own, and wait for it.

    On such a thread `KeyboardInterrupt` comes from the code itself, and never from Ctrl-C.

    Args:
        work: what runs the code.
        path: of the file that the code is from, for messages.
        limit_s: how long it may take. It is interrupted then, which native code does not notice.

    Raises:
        StillImporting: it took longer.
        ConfigurationError: it raised; the message has the exception's.
    """
    results: list[T] = []
    errors: list[HeadraceError] = []

    def run() -> None:
        try:
            results.append(work())
        except HeadraceError as error:
            errors.append(error)
        except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
            errors.append(ConfigurationError(f"{path}: {describe(error)}"))

    thread = threading.Thread(target=run, name=f"import {path.parent.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        interrupt(thread)
        raise StillImporting(
            f"{path}: expected the import to end within max_load_s = {limit_s:g} s, got no end",
            thread,
        )
    if errors:
        raise errors[0]
    return results[0]


def interrupt(thread: threading.Thread) -> None:
    """Raise `Interrupted` in a thread, once it runs Python code again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted)
    )


async def on_daemon_thread(work: Callable[[], T]) -> T:
    """Run something that blocks on a thread that does not keep the process from ending.

    A thread of `asyncio.to_thread` would: the interpreter waits for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def run() -> None:
        set_outcome: Callable[[Any], None] = done.set_result
        outcome: Any
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
            set_outcome, outcome = done.set_exception, error
        try:
            loop.call_soon_threadsafe(resolve, set_outcome, outcome)
        except RuntimeError:  # the loop is closed: nothing waits any more
            return

    threading.Thread(target=run, name="models", daemon=True).start()
    return await done


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
    except BaseException as error:  # a user's code may raise anything, SystemExit included
        if not is_of_user_code(error):
            raise
        raise ConfigurationError(f"{path}: {describe(error)}") from error
    return module


def is_of_user_code(error: BaseException) -> bool:
    """False for what was raised in a user's code from outside: Ctrl-C, and `Interrupted`."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is not threading.main_thread()
    return not isinstance(error, Interrupted)


def load_attribute(path: Path, name: str) -> Any:
    """A callable of a user's file. Raises `ConfigurationError`, see `load_module`."""
    found = getattr(load_module(path), name, None)
    if not callable(found):
        raise ConfigurationError(f"{path}: expected {name}, got none")
    return found


def describe(error: BaseException) -> str:
    """An exception in one line: its class and its text, in characters that can be written."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - an error may even fail to say what it is
        text = ""
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}..."
    text = text.encode("utf-8", "replace").decode()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(text: str) -> str:
    """The first line of what a library has to say, which may be a page."""
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
