"""Errors, grouped by how they are handled.

There are three kinds: a `Retriable` operation is retried within the deadline, a `Rejected` error
becomes the answer of the one request that it concerns, and a `Fatal` error ends the process, whose
unanswered work runs in another one.
"""

from __future__ import annotations

import re
from enum import StrEnum

MAX_ERROR_TEXT_CHARS = 2000
"""Limit of an exception's text in an answer or a log line: user code may raise any text."""
_MAX_RETRY_AFTER_MS = 2**63 - 1


class Code(StrEnum):
    """Codes of an error answer (`error_details.code` and the header `x-status`)."""

    INVALID_REQUEST = "INVALID_REQUEST"
    INVALID_TENSOR = "INVALID_TENSOR"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    MODEL_NOT_READY = "MODEL_NOT_READY"
    TOO_LARGE = "TOO_LARGE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    OVERLOADED = "OVERLOADED"
    CANCELLED = "CANCELLED"
    MODEL_FAILED = "MODEL_FAILED"
    INTERNAL = "INTERNAL"

    @property
    def is_dead_letter(self) -> bool:
        """True if a request that failed with this code can never succeed unchanged."""
        return self in _DEAD_LETTER_CODES

    @property
    def is_retriable(self) -> bool:
        """True if the same request may succeed when the caller sends it again."""
        return self in _RETRIABLE_CODES


_DEAD_LETTER_CODES = frozenset(
    {
        Code.INVALID_REQUEST,
        Code.INVALID_TENSOR,
        Code.UNKNOWN_MODEL,
        Code.TOO_LARGE,
        Code.MODEL_FAILED,
    }
)
_RETRIABLE_CODES = frozenset({Code.MODEL_NOT_READY, Code.OVERLOADED, Code.INTERNAL})


class HeadraceError(Exception):
    """Base class of all errors that Headrace raises."""


class Retriable(HeadraceError):
    """May succeed on retry: a broker is unavailable, a model is still loading."""


class Fatal(HeadraceError):
    """The process cannot continue; a restart or an operator must fix it."""


class ConfigurationError(Fatal):
    """The settings, a model's configuration or the command line are wrong (exit code 2)."""


class NotLoadableHere(ConfigurationError):
    """A process cannot load a version of a model whose files and configuration may be right.

    It lacks memory, a device, a package, time or the files, or code of the model has failed.
    """


class FilesDiffer(ConfigurationError):
    """The files of a version are not those of its manifest."""


class Rejected(HeadraceError):
    """One request cannot be served; the error becomes its answer. A model's code may raise it, too.

    Args:
        code: kind of refusal.
        message: what was expected, what was received, and where. Characters that UTF-8 cannot
            encode, such as those of `surrogateescape`, are replaced: no answer could hold them.
        retry_after_ms: when the caller may retry, if known; brought into the 63 bits of an answer.

    Raises:
        TypeError, ValueError, OverflowError: the code does not exist, or the time is not a number.
    """

    def __init__(self, code: Code, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = Code(code)
        self.message = str(message).encode("utf-8", "replace").decode()
        if retry_after_ms is not None:
            retry_after_ms = min(max(0, int(retry_after_ms)), _MAX_RETRY_AFTER_MS)
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @classmethod
    def mismatch(cls, code: Code, where: str, *, expected: str, got: str) -> Rejected:
        """Return the usual form: `inputs[0].shape: expected [-1, 64], got [1, 63]`."""
        return cls(code, f"{where}: expected {expected}, got {got}")


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes.

    The frames of a traceback keep their local variables alive, such as the encoded records of a
    failed transaction, while the error is being handled; if a frame refers to the error itself,
    until the next garbage collection.
    """
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")


def describe_error(error: BaseException, max_chars: int = MAX_ERROR_TEXT_CHARS) -> str:
    """Describe an exception in one printable line: its class and its text, cut at `max_chars`.

    Addresses of objects in it are left out: the same error would be another one each time.
    """
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - an error may even fail to say what it is
        text = ""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}..."
    text = _ADDRESS.sub(">", text.encode("utf-8", "replace").decode())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
