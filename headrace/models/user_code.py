"""Loading of the Python files of a model.

User code may raise anything, including `SystemExit` and `KeyboardInterrupt`, and it may never
return. None of that may end the process, or block it for longer than the model allows.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from headrace.errors import (
    Code,
    ConfigurationError,
    HeadraceError,
    NotLoadableHere,
    Rejected,
    describe_error,
)
from headrace.tuning import TUNING

T = TypeVar("T")


class Interrupted(BaseException):
    """Raised in a thread whose code takes too long; `except Exception` does not catch it."""


class StillImporting(NotLoadableHere):
    """A file was not imported within its time limit.

    Attributes:
        thread: the thread on which the import may still be running.
    """

    def __init__(self, message: str, thread: threading.Thread) -> None:
        super().__init__(message)
        self.thread = thread


def run_bounded(work: Callable[[], T], path: Path, limit_s: float) -> T:
    """Run user code on its own thread, and wait for it.

    On such a thread `KeyboardInterrupt` comes from the code itself, and never from Ctrl-C.

    Args:
        work: runs the code.
        path: path of the code's file, for messages.
        limit_s: time limit, after which the code is interrupted; native code is not affected.

    Raises:
        StillImporting: the time limit has passed.
        ConfigurationError: the code raised; the message contains the exception's.
    """
    results: list[T] = []
    errors: list[HeadraceError] = []

    def run() -> None:
        try:
            results.append(work())
        except HeadraceError as error:
            errors.append(error)
        except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
            errors.append(NotLoadableHere(f"{path}: {describe_error(error)}"))

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
    """Raise `Interrupted` in a thread as soon as it runs Python code again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted)
    )


class Interruptible:
    """Code on another thread that is interrupted only while it runs.

    An interruption is raised some time after it was requested. `run` waits for that time, because
    the interruption would otherwise hit the code that the thread runs next, or end the thread.

    Attributes:
        is_interrupted: True once an interruption was requested.
        is_done: True once the code has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_begun = False
        self.is_interrupted = False
        self.is_done = False

    def run(self, work: Callable[[], T]) -> T:
        """Run the code on this thread. Raises `Interrupted` if it was interrupted."""
        try:
            self._begin()
            result = work()
        finally:
            with self._lock:
                self.is_done = True
            if self.is_interrupted:
                time.sleep(TUNING.models.interrupt_arrival_s)
        if self.is_interrupted:  # the code may have caught it
            raise Interrupted
        return result

    def _begin(self) -> None:
        with self._lock:
            if self.is_interrupted:
                raise Interrupted
            self._has_begun = True

    def interrupt(self, thread: threading.Thread) -> None:
        """Interrupt the code on its thread; do nothing if it has ended. Code that has not begun yet
        never begins.
        """
        with self._lock:
            if self.is_done:
                return
            self.is_interrupted = True
            if self._has_begun:
                interrupt(thread)


class _WithoutBytecode(SourceFileLoader):
    """Compiles a file each time, and neither reads nor writes `__pycache__`.

    Python takes bytecode for that of a file with the same size and the same second of its last
    change. A file that was just changed would run as it was, and bytecode beside a signed file
    would run without a signature.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_module(path: Path) -> ModuleType:
    """Run a file as a module that is not entered into `sys.modules`.

    Raises:
        ConfigurationError: the file is missing, or raises; the message contains the exception's.
    """
    name = "headrace_model_" + re.sub(r"\W", "_", str(path.with_suffix("")))
    loader = _WithoutBytecode(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigurationError(f"{path}: expected a Python file, got none")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a user's code may raise anything, SystemExit included
        if not is_of_user_code(error):
            raise
        raise NotLoadableHere(f"{path}: {describe_error(error)}") from error
    return module


def is_of_user_code(error: BaseException) -> bool:
    """Return False for exceptions raised in user code from outside: Ctrl-C, and `Interrupted`."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is not threading.main_thread()
    return not isinstance(error, Interrupted)


def take_refusal(error: Rejected, failure_code: Code) -> Rejected:
    """Return what user code raised as a refusal that an answer can hold: a class of the user's may
    lack a part of it, or have parts of other types. Then it is a failure with `failure_code`.
    """
    try:
        return Rejected(error.code, error.message, retry_after_ms=error.retry_after_ms)
    except Exception as fault:  # noqa: BLE001 - a user's class may do anything
        return Rejected(failure_code, f"{describe_error(error)}: {describe_error(fault)}")


def is_of_headrace(error: BaseException) -> bool:
    """Return True if a class of ours is among those of an exception."""
    names = [each.__module__ for each in type(error).__mro__]
    return any(name.partition(".")[0] == "headrace" for name in names)


def load_attribute(path: Path, name: str) -> Any:
    """Return a callable of a user's file. Raises `ConfigurationError`, see `load_module`."""
    found = getattr(load_module(path), name, None)
    if not callable(found):
        raise ConfigurationError(f"{path}: expected {name}, got none")
    return found


def first_line(text: str) -> str:
    """Return the first line of a library's message, which may be a page long."""
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
