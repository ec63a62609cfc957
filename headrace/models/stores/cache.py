"""Cache of a machine for the versions of remote repositories, shared by its processes.

```
files/SHA256                            content, complete and checked
partial/SHA256                          a download that can be resumed
versions/DIGEST/MODEL/VERSION/...       hard links to files; DIGEST is the manifest's SHA-256
versions/DIGEST/manifest.json           has the time at which all files had been checked
versions/DIGEST/lock                    a process that uses the version holds a shared lock
```

`download.lock` lets one process download at a time. `index.lock` is held for moments: whoever takes
or removes a version has it. The kernel releases the locks of a process that ends in any way.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from headrace.errors import ConfigurationError
from headrace.models.packing.files import hash_file, write_atomically
from headrace.models.packing.manifest import MANIFEST_NAME, File, Manifest, parse_manifest
from headrace.models.repository import list_files
from headrace.models.stores.eviction import Cached, make_room
from headrace.models.stores.store import StoreUnavailable
from headrace.tuning import TUNING, ModelTuning

ReadRange: TypeAlias = Callable[[str, int, int], bytes]
"""Returns a part of a version's file: by name, start and length."""


class CacheSize(NamedTuple):
    """Size of the complete files in a cache, and the limit that it is kept within."""

    size_bytes: int
    limit_bytes: int


class ModelCache:
    """The cache in one directory, as one process uses it. For one thread at a time.

    Args:
        directory: of the cache; it is made when something is stored.
        limit_bytes: size of all complete files.
        tuning: sizes of reads, and the longest wait for another process.
        measure_free: returns the free bytes of the disk that has a directory.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        tuning: ModelTuning = TUNING.models,
        measure_free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._measure_free = measure_free
        self.directory = directory
        self._limit_bytes = limit_bytes
        self._tuning = tuning
        self._held: dict[str, int] = {}  # file descriptors with shared locks, by digest

    def fetch(self, content: bytes, manifest: Manifest, read_range: ReadRange) -> Path:
        """Return the directory of a version, downloading what is missing; it stays until released.

        Args:
            content: of the manifest.
            manifest: the same, parsed.
            read_range: reads the version's files.

        Raises:
            ConfigurationError: it does not fit, or a file is not what the manifest says.
            StoreUnavailable: see `read_range`; the download is resumed the next time. Or another
                process of the machine downloads for too long.
        """
        digest = hashlib.sha256(content).hexdigest()
        try:
            self._make_directories()
            held = self.hold(digest, manifest)
            if held is not None:
                return held
            with self._lock("download.lock"):
                held = self.hold(digest, manifest)  # another process may have been quicker
                if held is not None:
                    return held
                self._make_room(manifest)
                for name, file in manifest.files.items():
                    self._download(name, file, read_range)
                self._build(digest, content, manifest)
        except OSError as error:
            raise ConfigurationError(self._describe(error, manifest)) from error
        held = self.hold(digest, manifest)
        if held is None:
            raise ConfigurationError(f"{self.directory}: {digest} was removed by somebody else")
        return held

    def hold(self, digest: str, manifest: Manifest) -> Path | None:
        """Return a version that is complete in the cache, and keep it until `release_unused`."""
        root = self.directory / "versions" / digest
        place = root / manifest.model / manifest.version
        if not root.is_dir():
            return None
        with self._lock("index.lock"):
            if not _is_complete(place, manifest.files, root / MANIFEST_NAME):
                return None
            if digest in self._held and not _is_file(self._held[digest], root / "lock"):
                os.close(self._held.pop(digest))  # the directory was removed, and built again
            if digest not in self._held:
                # Later it may have more files: a model that is in use may write some.
                if not _is_as_built(place, digest, manifest):
                    return None
                handle = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                fcntl.flock(handle, fcntl.LOCK_SH)  # free: eviction has index.lock while it has it
                self._held[digest] = handle
            os.utime(root / "lock")
        return place

    def digest_of(self, directory: Path) -> str:
        """Return the digest of a version by the directory that `fetch` returned."""
        return directory.parent.parent.name

    def discard(self, directory: Path) -> None:
        """Have a version built again by the next `fetch`, from contents that are checked then.

        A file that has rotted on the disk still has its size and its time, which `hold` looks at.
        """
        with suppress(OSError):  # it is gone already, and is built again all the same
            os.utime(directory.parent.parent / MANIFEST_NAME, ns=(0, 0))

    def read_manifest(self, digest: str) -> bytes | None:
        """Return the manifest of a version in the cache, or None."""
        try:
            return (self.directory / "versions" / digest / MANIFEST_NAME).read_bytes()
        except OSError:
            return None

    def release_unused(self, in_use: Collection[Path]) -> None:
        """Let go of all versions but those in these directories."""
        used = {self.digest_of(path) for path in in_use}
        for digest in self._held.keys() - used:
            os.close(self._held.pop(digest))

    def measure(self) -> CacheSize:
        """Return the size of the complete files, whichever process downloaded them. Blocks.

        Raises:
            ConfigurationError: they cannot be read.
        """
        directory = self.directory / "files"
        try:
            return CacheSize(_measure_files(directory), self._limit_bytes)
        except OSError as error:
            raise ConfigurationError(f"models.cache_dir: {directory}: {error.strerror}") from error

    def read_note(self, name: str) -> bytes | None:
        """Return a note that `change_note` wrote, or None."""
        try:
            return (self.directory / "stores" / name).read_bytes()
        except OSError:
            return None

    def change_note(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """Keep something for the time when a store is unavailable.

        Args:
            name: of the note.
            change: returns the new content, given what any process of the machine has written.

        Raises:
            ConfigurationError: it cannot be written.
        """
        path = self.directory / "stores" / name
        try:
            self._make_directories()
            with self._lock("index.lock"):
                write_atomically(path, change(self.read_note(name)), path.parent)
        except OSError as error:
            raise ConfigurationError(f"models.cache_dir: {path}: {error.strerror}") from error
        except StoreUnavailable as error:
            raise ConfigurationError(f"models.cache_dir: {error}") from error

    def _make_directories(self) -> None:
        for name in ("files", "partial", "versions", "stores"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Hold a lock that the processes of the machine share.

        Raises:
            StoreUnavailable: another process has held it for too long, as while it downloads a
                large version; it may be free later.
        """
        path = self.directory / name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            end_s = time.monotonic() + self._tuning.cache_lock_timeout_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end_s:
                        raise StoreUnavailable(
                            f"{path}: another process has held it for "
                            f"{self._tuning.cache_lock_timeout_s:g} s"
                        ) from None
                    time.sleep(self._tuning.cache_lock_interval_s)
            yield
        finally:
            os.close(handle)

    # --- room -------------------------------------------------------------------------------------

    def _make_room(self, manifest: Manifest) -> None:
        wanted = {file.sha256: file.bytes for file in manifest.files.values()}
        with self._lock("index.lock"):
            # No version is built now: that takes download.lock, which this process has.
            for path in (self.directory / "versions").glob(".*"):
                shutil.rmtree(path)
            cached = [self._look_at(path) for path in (self.directory / "versions").iterdir()]
            free = self._measure_free(self.directory)
            # What the cache has now and what is free is the most that it can have on this disk.
            held = self.measure().size_bytes + _measure_files(self.directory / "partial")
            limit_bytes = min(self._limit_bytes, held + free)
            room = make_room(cached, wanted, limit_bytes)
            for evicted in room.evicted:
                shutil.rmtree(self.directory / "versions" / evicted.digest)
            gone = {evicted.digest for evicted in room.evicted}
            needed = wanted.keys() | {
                sha256 for each in cached if each.digest not in gone for sha256 in each.files
            }
            for path in (self.directory / "files").iterdir():
                if path.name not in needed:
                    path.unlink()
            for path in (self.directory / "partial").iterdir():
                if path.name not in wanted:
                    path.unlink()
        if room.total_bytes > limit_bytes:
            in_use = sum(each.in_use for each in cached)
            needs = (
                f"{manifest.model}/{manifest.version} needs {room.total_bytes - room.kept_bytes} "
                f"bytes beside {room.kept_bytes} of {in_use} versions in use"
            )
            if limit_bytes < self._limit_bytes:
                raise ConfigurationError(
                    f"models.cache_dir: {needs}, got {free} free on the disk of {self.directory}"
                )
            raise ConfigurationError(
                f"models.cache_bytes: {needs}, got a limit of {self._limit_bytes}"
            )

    def _look_at(self, root: Path) -> Cached:
        """Describe a version; one that cannot be read counts as empty, and unused for long."""
        try:
            manifest = parse_manifest((root / MANIFEST_NAME).read_bytes())
            handle = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except (OSError, ConfigurationError):
            return Cached(root.name, 0, False, {})
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            in_use = False
        except BlockingIOError:
            in_use = True
        finally:
            used_s = os.fstat(handle).st_mtime
            os.close(handle)
        files = {file.sha256: file.bytes for file in manifest.files.values()}
        return Cached(root.name, used_s, in_use, files)

    # --- downloads --------------------------------------------------------------------------------

    def _download(self, name: str, file: File, read_range: ReadRange) -> None:
        path = self.directory / "files" / file.sha256
        if path.is_file() and hash_file(path) == file:
            return
        partial = self.directory / "partial" / file.sha256
        with partial.open("ab") as target:
            if target.tell() > file.bytes:
                target.truncate(0)
            while (start := target.tell()) < file.bytes:
                length = min(self._tuning.store_read_bytes, file.bytes - start)
                part = read_range(name, start, length)
                target.write(part)
                target.flush()
                if len(part) < length:
                    break  # the object is shorter than the manifest says
            os.fsync(target.fileno())
        got = hash_file(partial)
        if got != file:
            partial.unlink()
            raise ConfigurationError(f"{name}: expected {file}, got {got} from the store")
        partial.chmod(0o444)
        partial.replace(path)

    def _build(self, digest: str, content: bytes, manifest: Manifest) -> None:
        versions = self.directory / "versions"
        root, new = versions / digest, versions / f".{digest}"
        shutil.rmtree(new, ignore_errors=True)
        model = new / manifest.model
        place = model / manifest.version
        place.mkdir(parents=True)
        for name, file in manifest.files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).hardlink_to(self.directory / "files" / file.sha256)
        for name, text in manifest.model_files.items():
            (model / name).parent.mkdir(parents=True, exist_ok=True)
            (model / name).write_bytes(text.encode())
        for path in (new / MANIFEST_NAME, place / MANIFEST_NAME):
            path.write_bytes(content)
        # Not the time by the clock, which may have been set back since a file was downloaded.
        checked_ns = max(path.stat().st_mtime_ns for path in (place, *place.rglob("*")))
        os.utime(new / MANIFEST_NAME, ns=(checked_ns, checked_ns))
        with self._lock("index.lock"):
            if root.exists():  # not as it was built, or `hold` would have returned it
                shutil.rmtree(root)
            new.rename(root)

    def _describe(self, error: OSError, manifest: Manifest) -> str:
        free = shutil.disk_usage(self.directory).free if self.directory.is_dir() else 0
        return (
            f"models.cache_dir: {self.directory}: {error.strerror or error}; "
            f"{manifest.model}/{manifest.version} has {manifest.total_bytes} bytes, "
            f"{free} are free on the disk"
        )


def _measure_files(directory: Path) -> int:
    """Return the size of the files in a directory, which need not be there."""
    size_bytes = 0
    try:
        with os.scandir(directory) as files:
            for file in files:
                with suppress(FileNotFoundError):  # another process makes room meanwhile
                    size_bytes += file.stat().st_size
    except FileNotFoundError:
        pass  # nothing has been stored yet
    return size_bytes


def _is_complete(place: Path, files: Mapping[str, File], built: Path) -> bool:
    """Return whether a version has all files, unchanged since `built` was written."""
    try:
        built_ns = built.stat().st_mtime_ns
        found = {name: (place / name).stat() for name in files}
    except OSError:
        return False
    return all(
        found[name].st_size == file.bytes and found[name].st_mtime_ns <= built_ns
        for name, file in files.items()
    )


def _is_as_built(place: Path, digest: str, manifest: Manifest) -> bool:
    """Return whether a complete version has the texts that it was built with, and no more files.

    The contents of its own files are checked when it is opened.
    """
    model = place.parent
    texts = {name: text.encode() for name, text in manifest.model_files.items()}
    names = {*texts, *(f"{place.name}/{name}" for name in (*manifest.files, MANIFEST_NAME))}
    try:
        return (
            all(
                hashlib.sha256((each / MANIFEST_NAME).read_bytes()).hexdigest() == digest
                for each in (place, model.parent)
            )
            and all((model / name).read_bytes() == text for name, text in texts.items())
            and {each.relative_to(model).as_posix() for each in list_files(model)} == names
        )
    except OSError:
        return False


def _is_file(handle: int, path: Path) -> bool:
    """Return whether a path leads to the file that is open."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
