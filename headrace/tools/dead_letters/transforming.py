"""A user's `transform(record)`, applied to the request made from a letter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from headrace.errors import ConfigurationError
from headrace.log.port import NewRecord
from headrace.models.user_code import describe, load_attribute

Transform: TypeAlias = Callable[[NewRecord], NewRecord | None]
"""Returns the record to send instead; None skips the letter."""


def load_transform(path: Path) -> Transform:
    """Load the function `transform` of a user's file, and check its results.

    It receives the request as a `headrace.log.port.NewRecord` (`key`, `value`, `headers`,
    `timestamp_ms`), and returns one: `record._replace(value=…)`.

    Raises:
        ConfigurationError: there is no such function. The returned function raises it if the user's
            function raises, or returns something else.
    """
    function = load_attribute(path, "transform")

    def transform(record: NewRecord) -> NewRecord | None:
        try:
            result: NewRecord | None = function(record)
        except Exception as error:  # a user's code may raise anything
            raise ConfigurationError(f"{path}: transform: {describe(error)}") from error
        if result is not None and not _is_record(result):
            raise ConfigurationError(
                f"{path}: transform: expected a record with key and value of bytes or None and "
                f"headers of (str, bytes or None), or None, got {result!r:.200}"
            )
        return result

    return transform


def _is_record(result: Any) -> bool:
    return (
        isinstance(result, NewRecord)
        and isinstance(result.key, bytes | None)
        and isinstance(result.value, bytes | None)
        and isinstance(result.headers, Sequence)
        and all(_is_header(header) for header in result.headers)
    )


def _is_header(header: Any) -> bool:
    return (
        isinstance(header, tuple)
        and len(header) == 2
        and isinstance(header[0], str)
        and isinstance(header[1], bytes | None)
    )
