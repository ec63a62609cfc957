"""What can go wrong, and what its catcher does about it.

Every error is one of three kinds, and the kind names the action: a `Retriable` one is tried
again within the deadline, a `Rejected` one becomes the answer of the one request that it
concerns, and a `Fatal` one ends the process, whose unanswered work runs elsewhere.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """The codes of an error answer (`error_details.code` and the header `x-status`)."""

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
        """Whether a request that failed with this code can never succeed as it is."""
        return self in _DEAD_LETTER_CODES

    @property
    def is_retriable(self) -> bool:
        """Whether the caller may send the same request again and hope."""
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
    """The root of all errors raised on purpose."""


class Retriable(HeadraceError):
    """It may work when tried again: a broker that is away, a model that is busy loading."""


class Fatal(HeadraceError):
    """The process cannot go on; a restart, or a person, has to mend it."""


class ConfigurationError(Fatal):
    """The settings, a model's configuration or the command line are wrong (exit code 2)."""


class Rejected(HeadraceError):
    """One request cannot be served; the error becomes its answer.

    Args:
        code: what kind of refusal.
        message: what was expected, what came, and where.
        retry_after_ms: when the caller may try again, where that is known.
    """

    def __init__(self, code: Code, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @classmethod
    def mismatch(cls, code: Code, where: str, *, expected: str, got: str) -> Rejected:
        """The usual form: `inputs[0].shape: expected [-1, 64], got [1, 63]`."""
        return cls(code, f"{where}: expected {expected}, got {got}")


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes.

    The frames of a traceback keep their local variables alive: the encoded records of a
    transaction that failed, for as long as its error is handled, and until the next run of the
    garbage collector where one of the frames refers to the error itself.
    """
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
