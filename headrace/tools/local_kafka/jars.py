"""Kafka's jar files: their list (`jars.lock`), and their cache on this machine.

A jar enters the cache only after its SHA-256 was compared with the lock, and by an atomic rename,
so a jar in the cache is complete. Later starts compare only sizes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.tools.local_kafka.errors import BrokerUnavailable, ChecksumMismatch

LOCK_FILE = Path(__file__).with_name("jars.lock")
_CACHE_LOCK_TIMEOUT_S = 600.0
_CACHE_LOCK_POLL_S = 0.05

Fetch = Callable[[Sequence["Jar"], Path], None]
"""Fetches the given jars into a folder, each under its `file_name`."""


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of the lock: Maven coordinates, size in bytes, SHA-256 in hexadecimal digits."""

    group: str
    artifact: str
    version: str
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    @property
    def repository_path(self) -> str:
        """Return the file's path in a Maven repository, relative to its root (the
        default layout).
        """
        folder = self.group.replace(".", "/")
        return f"{folder}/{self.artifact}/{self.version}/{self.file_name}"

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


def read_lock(lock_file: Path = LOCK_FILE) -> tuple[Jar, ...]:
    """Read the jars of a lock file, in its order."""
    lines = lock_file.read_text(encoding="ascii").splitlines()
    return tuple(_parse(line) for line in lines if line and not line.startswith("#"))


def _parse(line: str) -> Jar:
    coordinates, size_bytes, sha256 = line.split()
    group, artifact, version = coordinates.split(":")
    return Jar(group, artifact, version, int(size_bytes), sha256)


def format_lock(jars: Sequence[Jar]) -> str:
    """Return the text of a lock file, as read by `read_lock`."""
    lines = (f"{jar} {jar.size_bytes} {jar.sha256}\n" for jar in jars)
    return "# group:artifact:version size-in-bytes sha256\n" + "".join(lines)


def kafka_version(jars: Sequence[Jar]) -> str:
    """Return the version of Kafka among `jars`."""
    return next(jar.version for jar in jars if jar.artifact.startswith("kafka_"))


def cache_directory(jars: Sequence[Jar]) -> Path:
    """Return `kafka-<version>` in Headrace's user cache (`XDG_CACHE_HOME`, or `~/.cache`).

    Source: XDG Base Directory Specification, which says that a relative path is to be ignored.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = configured if configured.is_absolute() else Path.home() / ".cache"
    return root / "headrace" / f"kafka-{kafka_version(jars)}"


def ensure_jars(jars: Sequence[Jar], directory: Path, fetch: Fetch) -> tuple[Path, ...]:
    """Return the paths of `jars` in `directory`, after fetching the missing ones.

    Any number of processes may call this at once: one fetches, the others wait for it.

    Raises:
        BrokerUnavailable: the jars cannot be fetched, or the cache cannot be written.
        ChecksumMismatch: a fetched file differs from the one in the lock.
    """
    if _missing(jars, directory):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _exclusive(directory / ".lock"):
                _fetch_missing(jars, directory, fetch)
        except OSError as error:
            raise BrokerUnavailable(f"cannot keep Kafka's jars in {directory}: {error}") from error
    return tuple(directory / jar.file_name for jar in jars)


def _missing(jars: Sequence[Jar], directory: Path) -> list[Jar]:
    return [jar for jar in jars if _size_bytes(directory / jar.file_name) != jar.size_bytes]


def _size_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _fetch_missing(jars: Sequence[Jar], directory: Path, fetch: Fetch) -> None:
    missing = _missing(jars, directory)
    if not missing:
        return
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as name:
        fetched = Path(name)
        fetch(missing, fetched)
        for jar in missing:
            verify(jar, fetched / jar.file_name)
        for jar in missing:
            (fetched / jar.file_name).replace(directory / jar.file_name)


def verify(jar: Jar, path: Path) -> None:
    """Compare a file with the lock. Raises `ChecksumMismatch`."""
    if not path.is_file():
        raise ChecksumMismatch(f"{jar}: expected a file {path.name}, got none")
    actual = sha256_of(path)
    if actual != jar.sha256:
        raise ChecksumMismatch(
            f"{jar}: expected sha256 {jar.sha256} ({jar.size_bytes} bytes), "
            f"got {actual} ({path.stat().st_size} bytes)"
        )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system releases it when the holder dies."""
    deadline = time.monotonic() + _CACHE_LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"another process has held {path} for {_CACHE_LOCK_TIMEOUT_S:.0f} s"
                    ) from None
                time.sleep(_CACHE_LOCK_POLL_S)
        yield
