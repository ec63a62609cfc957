"""Files that are read anew when they change: certificates, and the keys of callers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from headrace.errors import ConfigurationError

T = TypeVar("T")


class Watched(Generic[T]):
    """The content of some files, loaded again by `refresh` when they have changed.

    While they cannot be used, such as between the writing of a certificate and that of its key,
    the former content stays in use.

    Attributes:
        files: the files.

    Args:
        load: reads them; raises `ConfigurationError` if they cannot be used.

    Raises:
        ConfigurationError: the files cannot be used.
    """

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        self.files = files
        self._load = load
        # Looked at before it is read: a change in between is found by the next look.
        self._seen = self._look()
        self._current = load()
        self._fault = ""
        """Why the files could not be used when they were last read; empty if they could."""

    def current(self) -> T:
        """Return the content. Reads no file; any thread may call this, and those of gRPC do."""
        return self._current

    def refresh(self) -> bool:
        """Load the files if they have changed since they were last loaded, and return whether they
        were loaded. Blocks while it reads them.

        Raises:
            ConfigurationError: they cannot be used. The same fault is raised once, and they are
                loaded again by each further call: what kept them from being read, such as their
                mode or a lack of file descriptors, may pass without a change of the files.
        """
        seen = self._look()
        if seen == self._seen and not self._fault:
            return False
        if seen != self._seen:
            self._fault = ""
        self._seen = seen  # before it is read, as at the start
        try:
            self._current = self._load()
        except Exception as error:  # a file that breaks its parser ends no process
            is_known = isinstance(error, ConfigurationError)
            fault = str(error) if is_known else f"{', '.join(map(str, self.files))}: {error!r}"
            if fault == self._fault:
                return False
            self._fault = fault
            raise ConfigurationError(fault) from error
        self._fault = ""
        return True

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return what shows a change: a file that was replaced has another inode."""
        found: list[tuple[int, int, int] | None] = []
        for file in self.files:
            try:
                stat = file.stat()
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return found


def read_file(setting: str, file: Path) -> bytes:
    """Return the bytes of a file that a setting names. Raises `ConfigurationError`."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{setting}: {file}: expected a file that can be read: {error.strerror}"
        ) from error
