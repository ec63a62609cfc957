"""Repositories in object stores, with the store of the library that is in memory."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from headrace.config import Settings, make_settings
from headrace.errors import ConfigurationError
from headrace.models.config import read_model_config
from headrace.models.packing.files import make_manifest, write_manifest
from headrace.models.packing.manifest import Manifest
from headrace.models.packing.signatures import Trust
from headrace.models.registry import Models
from headrace.models.repositories import RepositoryList
from headrace.models.repository import FoundVersion, Repository, read_signature
from headrace.models.scan import VersionScanner
from headrace.models.stores.cache import CacheSize, ModelCache
from headrace.models.stores.copying import pull_version, push_version
from headrace.models.stores.eviction import Cached, Room, make_room
from headrace.models.stores.remote import RemoteRepository
from headrace.models.stores.store import ObjectChanged, Store, StoreUnavailable, open_store
from headrace.protocol.control import WantedModel
from headrace.tuning import ModelTuning
from tests.support.models import add_version, digits
from tests.support.s3_server import s3_server

EIGHT = {"max_batch_size": 8}
CREATED = datetime(2026, 1, 2, tzinfo=UTC)
TUNING = ModelTuning(store_read_bytes=1000, store_attempts=2, cache_lock_timeout_s=0)
PYTHON = """
class Model:
    inputs = [("x", "FP32", (-1, 2))]
    outputs = [("y", "FP32", (-1, 2))]

    def run(self, inputs):
        return {"y": inputs["x"]}
"""


class OutageStore(Store):
    """A store that can become unavailable, or refuse, and counts the bytes read from it."""

    def __init__(self) -> None:
        self.objects = MemoryStore()
        super().__init__(self.objects, "s3://models", tuning=TUNING)
        self.is_unavailable = False
        self.is_refusing = False
        self.reads_left = 1_000_000
        self.broken = ""
        self.starts: list[int] = []

    def list_versions(self, within_s: float | None = None) -> dict[str, list[int]]:
        self._require()
        return super().list_versions(within_s)

    def read(self, key: str, within_s: float | None = None) -> bytes:
        self._require()
        return super().read(key, within_s)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self._require()
        if not self.reads_left or key == self.broken:
            raise StoreUnavailable("the connection broke")
        self.reads_left -= 1
        self.starts.append(start)
        return super().read_range(key, start, length)

    def _require(self) -> None:
        if self.is_unavailable:
            raise StoreUnavailable("s3://models: nobody answers")
        if self.is_refusing:
            raise ConfigurationError("s3://models: PermissionDeniedError: status code: 403")


@pytest.fixture
def store() -> OutageStore:
    return OutageStore()


def upload(
    store: Store,
    scratch: Path,
    number: int = 1,
    config: str = "",
    *,
    weight: float = 1.0,
    code: str = "",
    name: str = "digits",
) -> Manifest:
    """Pack a version and copy it to the store, the manifest last."""
    directory = scratch / name / str(number)
    add_version(scratch, name, number, digits(weight), config)
    if code:
        (directory / "model.py").write_text(code)
    found = read_model_config(directory.parent / "model.toml", Settings())
    signature = read_signature(FoundVersion(str(number), directory, ""), found)
    manifest = make_manifest(directory, found, signature, CREATED, {})
    write_manifest(directory, manifest)
    for each in (*manifest.files, "manifest.json"):
        store.write(f"{name}/{number}/{each}", directory / each)
    return manifest


def settings_with(**models: Any) -> Settings:
    """Settings of the section `models`."""
    return make_settings({"models": models})


def open_models(store: Store, cache: Path, limit_bytes: int = 10**9, **models: Any) -> Models:
    """The models of one process."""
    settings = settings_with(**models)
    remote = RemoteRepository(store, ModelCache(cache, limit_bytes, TUNING), settings)
    return Models(settings, scanner=VersionScanner(remote))


def states(models: Models) -> dict[str, str]:
    """The versions and faults of a process: `name/version` to its reason, empty if it serves."""
    return {f"{each['name']}/{each['version']}": each["reason"] for each in models.catalog.status()}


def test_version_with_manifest_is_served(store: OutageStore, tmp_path: Path) -> None:
    """Files, and the configuration that was packed with them, come from the store."""
    upload(store, tmp_path / "made", config="max_batch_size = 4")
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert models.catalog.lookup("digits").max_batch_size == 4


def test_upload_without_manifest_is_not_seen(store: OutageStore, tmp_path: Path) -> None:
    """A version counts when the object that is written last is there."""
    upload(store, tmp_path / "made")
    store.write("digits/2/model.onnx", b"half of it")
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert states(models) == {"digits/1": ""}


async def test_version_pushed_later_is_served_after_reload(
    store: OutageStore, tmp_path: Path
) -> None:
    """A reload asks the store again."""
    upload(store, tmp_path / "made")
    models = open_models(store, tmp_path / "cache")
    models.open()
    upload(store, tmp_path / "made", 2, weight=2.0)
    reloaded = await models.reload()
    assert reloaded.added == ("digits/2",)
    assert models.catalog.lookup("digits").version == "2"


async def test_tampered_version_never_replaces_working_one(
    store: OutageStore, tmp_path: Path
) -> None:
    """A byte that differs from the manifest is found before the version is opened."""
    upload(store, tmp_path / "made")
    models = open_models(store, tmp_path / "cache")
    models.open()
    upload(store, tmp_path / "made", 2, weight=2.0)
    content = bytearray((tmp_path / "made" / "digits" / "2" / "model.onnx").read_bytes())
    content[-1] ^= 1
    store.write("digits/2/model.onnx", bytes(content))
    await models.reload()
    assert models.catalog.lookup("digits").version == "1"
    assert "model.onnx: expected" in states(models)["digits/2"]


def test_manifest_of_another_version_is_refused(store: OutageStore, tmp_path: Path) -> None:
    """An old version cannot be passed off as a new one."""
    upload(store, tmp_path / "made")
    store.write("digits/2/manifest.json", tmp_path / "made/digits/1/manifest.json")
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert "got that of digits/1" in states(models)["digits/2"]


def test_unsigned_version_is_refused_before_download(store: OutageStore, tmp_path: Path) -> None:
    """Nothing of an untrusted version reaches the disk."""
    key = tmp_path / "release.pub"
    key.write_text(
        "-----BEGIN PUBLIC KEY-----\n"
        "MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n"
        "-----END PUBLIC KEY-----\n"
    )
    upload(store, tmp_path / "made")
    models = open_models(store, tmp_path / "cache", require_signature=True, trusted_keys=[str(key)])
    models.open()
    assert "models.trusted_keys" in states(models)["digits/1"]
    assert store.starts == []


def test_python_from_store_is_refused_unless_allowed(store: OutageStore, tmp_path: Path) -> None:
    """Code from elsewhere runs only if the settings say so."""
    upload(store, tmp_path / "made", config='backend = "python"', code=PYTHON)
    refusing = open_models(store, tmp_path / "cache")
    refusing.open()
    allowing = open_models(store, tmp_path / "cache", allow_python=True)
    allowing.open()
    assert "models.allow_python" in states(refusing)["digits/1"]
    assert states(allowing) == {"digits/1": ""}


def test_process_started_while_store_is_unavailable_serves_from_cache(
    store: OutageStore, tmp_path: Path
) -> None:
    """Another process of the machine has fetched the models before."""
    upload(store, tmp_path / "made")
    open_models(store, tmp_path / "cache").open()
    store.is_unavailable = True
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert states(models) == {"digits/1": ""}


def test_process_started_while_store_refuses_its_login_serves_from_cache(
    store: OutageStore, tmp_path: Path
) -> None:
    """As after the login has expired; without a cache it is an error."""
    upload(store, tmp_path / "made")
    open_models(store, tmp_path / "cache").open()
    store.is_refusing = True
    models = open_models(store, tmp_path / "cache")
    assert models.open().outages == ("s3://models: PermissionDeniedError: status code: 403",)
    assert states(models) == {"digits/1": ""}
    with pytest.raises(ConfigurationError, match=r"^models\.repository: s3://models: Permission"):
        open_models(store, tmp_path / "other").open()


def want(models: Models, **versions: list[str]) -> None:
    """Want these versions, as the control topic does; the first one of each is the default."""
    models.want(
        {name: WantedModel(versions=each, default=each[0]) for name, each in versions.items()}
    )


def test_processes_with_other_models_restart_from_shared_cache(
    store: OutageStore, tmp_path: Path
) -> None:
    """What one process has seen of the store does not make another one forget its own models."""
    upload(store, tmp_path / "made")
    upload(store, tmp_path / "made", name="faces")
    for wanted in ({"digits": ["1"]}, {"faces": ["1"]}):
        models = open_models(store, tmp_path / "cache")
        want(models, **wanted)
        models.open()
    store.is_unavailable = True
    models = open_models(store, tmp_path / "cache")
    want(models, digits=["1"])
    models.open()
    assert states(models) == {"digits/1": ""}


def test_version_withdrawn_from_store_is_not_served_from_cache(
    store: OutageStore, tmp_path: Path
) -> None:
    """A process that starts in an outage serves what the store had last."""
    upload(store, tmp_path / "made")
    upload(store, tmp_path / "made", 2, weight=2.0)
    open_models(store, tmp_path / "cache").open()
    obstore.delete(store.objects, "digits/2/manifest.json")
    open_models(store, tmp_path / "cache").open()
    store.is_unavailable = True
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert states(models) == {"digits/1": ""}


async def test_store_that_is_emptied_is_named_once_by_each_process(
    store: OutageStore, tmp_path: Path
) -> None:
    """Also by one that has read it before another one noted in the cache that it is empty."""
    upload(store, tmp_path / "made")
    first, second = (open_models(store, tmp_path / "cache") for _ in range(2))
    assert [each.open().emptied for each in (first, second)] == [(), ()]
    obstore.delete(store.objects, "digits/1/manifest.json")
    found = [(await each.reload()).emptied for each in (first, second, first, second)]
    assert found == [(store.name,), (store.name,), (), ()]


def test_version_without_usable_manifest_leaves_other_wanted_ones(
    store: OutageStore, tmp_path: Path
) -> None:
    """The default serves on after a restart, although a version beside it has failed."""
    upload(store, tmp_path / "made")
    store.write("digits/2/manifest.json", b"{}")
    models = open_models(store, tmp_path / "cache")
    want(models, digits=["1", "2"])
    models.open()
    assert states(models) == {
        "digits/1": "",
        "digits/2": "s3://models/digits/2: manifest.json: Object missing required field `model`",
    }


def test_version_missing_in_cache_during_outage_leaves_other_wanted_ones(
    store: OutageStore, tmp_path: Path
) -> None:
    """Its download had failed, and now the store is unavailable."""
    upload(store, tmp_path / "made")
    upload(store, tmp_path / "made", 2, weight=2.0)
    store.broken = "digits/2/model.onnx"
    for is_unavailable in (False, True):
        store.is_unavailable = is_unavailable
        models = open_models(store, tmp_path / "cache")
        want(models, digits=["1", "2"])
        models.open()
    assert states(models) == {
        "digits/1": "",
        "digits/2": "s3://models/digits/2: s3://models is unavailable, "
        "and the version is not cached",
    }


async def test_outage_after_broken_download_changes_no_settings_of_version_in_service(
    store: OutageStore, tmp_path: Path
) -> None:
    """They are those of the highest wanted version, whether the store answers or not."""
    upload(store, tmp_path / "made", config="max_batch_size = 4")
    upload(store, tmp_path / "made", 2, config="max_batch_size = 8", weight=2.0)
    store.broken = "digits/2/model.onnx"
    models = open_models(store, tmp_path / "cache")
    want(models, digits=["1", "2"])
    models.open()
    before = models.catalog.lookup("digits", "1")
    store.is_unavailable = True
    await models.reload(retry=())
    assert models.catalog.lookup("digits", "1") is before


async def test_reload_while_store_is_unavailable_changes_nothing(
    store: OutageStore, tmp_path: Path
) -> None:
    """The version that serves stays the same object."""
    upload(store, tmp_path / "made")
    models = open_models(store, tmp_path / "cache")
    models.open()
    before = models.catalog.lookup("digits")
    store.is_unavailable = True
    reloaded = await models.reload()
    assert (reloaded.changed, reloaded.faults) == ((), ())
    assert reloaded.outages == ("s3://models: nobody answers",)
    assert models.catalog.lookup("digits") is before


def test_unavailable_store_that_was_never_seen_is_an_error(
    store: OutageStore, tmp_path: Path
) -> None:
    """Without a cache nobody knows what there is."""
    store.is_unavailable = True
    with pytest.raises(ConfigurationError, match=r"models\.repository: .*nobody answers"):
        open_models(store, tmp_path / "cache").open()


async def test_broken_download_is_resumed_where_it_broke(
    store: OutageStore, tmp_path: Path
) -> None:
    """No byte that has been downloaded is read again."""
    upload(store, tmp_path / "made")
    models = open_models(store, tmp_path / "cache")
    store.reads_left = 1
    models.open()
    assert "the connection broke" in states(models)["digits/1"]
    store.reads_left = 1_000_000
    await models.reload()
    assert states(models) == {"digits/1": ""}
    assert store.starts == sorted(set(store.starts))


def test_broken_download_counts_as_outage_and_leaves_others_alone(
    store: OutageStore, tmp_path: Path
) -> None:
    """Whoever scans tries again then; another model is downloaded all the same."""
    upload(store, tmp_path / "made")
    upload(store, tmp_path / "made", name="faces", weight=2.0)
    store.broken = "digits/1/model.onnx"
    models = open_models(store, tmp_path / "cache")
    assert models.open().outages == ("the connection broke",)
    assert states(models) == {
        "digits/1": "s3://models/digits/1: the connection broke",
        "faces/1": "",
    }


def test_second_process_downloads_nothing(store: OutageStore, tmp_path: Path) -> None:
    """The cache belongs to the machine."""
    upload(store, tmp_path / "made")
    open_models(store, tmp_path / "cache").open()
    store.reads_left = 0
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert states(models) == {"digits/1": ""}


async def test_unused_version_makes_room_for_new_one(store: OutageStore, tmp_path: Path) -> None:
    """A version that was replaced and let go is removed when the next one needs its place."""
    size = upload(store, tmp_path / "made").total_bytes
    models = open_models(store, tmp_path / "cache", 2 * size + size // 2)
    models.open()
    for number in (2, 3, 4):
        upload(store, tmp_path / "made", number, weight=number)
        await models.reload()
        await models.reload()  # by now the version before it is not in use any more
    assert models.catalog.lookup("digits").version == "4"
    kept = [path.stat().st_size for path in (tmp_path / "cache" / "files").iterdir()]
    assert sum(kept) <= 2 * size + size // 2


async def test_version_that_does_not_fit_fails_with_figures(
    store: OutageStore, tmp_path: Path
) -> None:
    """The version in use is not removed, and continues to serve."""
    size = upload(store, tmp_path / "made").total_bytes
    models = open_models(store, tmp_path / "cache", size + 10)
    models.open()
    new = upload(store, tmp_path / "made", 2, weight=2.0).total_bytes
    await models.reload()
    assert states(models)["digits/2"].endswith(
        f"models.cache_bytes: digits/2 needs {new} bytes beside {size} of 1 versions in use, "
        f"got a limit of {size + 10}"
    )
    assert models.catalog.lookup("digits").version == "1"


def open_on_disk(store: Store, cache: Path, disk_bytes: int) -> Models:
    """The models of a process whose cache is on a disk of this size, and has no other limit."""

    def measure_free(directory: Path) -> int:
        parts = [path for name in ("files", "partial") for path in (directory / name).iterdir()]
        return disk_bytes - sum(path.stat().st_size for path in parts)

    kept = ModelCache(cache, 10**9, TUNING, measure_free=measure_free)
    return Models(Settings(), scanner=VersionScanner(RemoteRepository(store, kept, Settings())))


async def test_longest_unused_version_makes_room_when_disk_is_full(
    store: OutageStore, tmp_path: Path
) -> None:
    """The version before the last one stays, and the one before it goes."""
    size = upload(store, tmp_path / "made").total_bytes
    models = open_on_disk(store, tmp_path / "cache", 2 * size + size // 2)
    models.open()
    for number in (2, 3, 4):
        upload(store, tmp_path / "made", number, weight=number)
        await models.reload()
        await models.reload()  # by now the version before it is not in use any more
        assert models.catalog.lookup("digits").version == str(number)
    versions = {path.name for path in (tmp_path / "cache" / "versions").glob("*/digits/*")}
    assert versions == {"3", "4"}


async def test_version_for_which_disk_has_no_room_fails_with_figures(
    store: OutageStore, tmp_path: Path
) -> None:
    """The version in use is not removed, and continues to serve."""
    size = upload(store, tmp_path / "made").total_bytes
    models = open_on_disk(store, tmp_path / "cache", size + 10)
    models.open()
    new = upload(store, tmp_path / "made", 2, weight=2.0).total_bytes
    await models.reload()
    assert (
        f"models.cache_dir: digits/2 needs {new} bytes beside {size} of 1 versions in use, "
        "got 10 free on the disk"
    ) in states(models)["digits/2"]
    assert models.catalog.lookup("digits").version == "1"


async def test_disk_that_fills_during_download_fails_version_with_figures(
    store: OutageStore, tmp_path: Path
) -> None:
    """Somebody else has taken the room; the next scan tries again."""
    upload(store, tmp_path / "made")
    models = open_models(store, tmp_path / "cache")
    models.open()
    new = upload(store, tmp_path / "made", 2, weight=2.0)
    full = tmp_path / "cache" / "partial" / new.files["model.onnx"].sha256
    full.symlink_to("/dev/full")
    await models.reload()
    fault = states(models)["digits/2"]
    assert "models.cache_dir" in fault
    assert f"No space left on device; digits/2 has {new.total_bytes} bytes" in fault
    assert models.catalog.lookup("digits").version == "1"
    full.unlink()
    await models.reload()
    assert models.catalog.lookup("digits").version == "2"


def test_note_that_cannot_be_written_fails_no_version(store: OutageStore, tmp_path: Path) -> None:
    """It is of use in an outage only; until it is written, the repository is read again."""
    upload(store, tmp_path / "made")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "stores").symlink_to("/proc")  # where nobody can write
    models = open_models(store, cache)
    [reason] = models.open().outages
    assert reason.startswith(f"models.cache_dir: {cache}/stores/")
    assert reason == models.open().outages[0]  # it is logged once
    assert states(models) == {"digits/1": ""}


def test_cache_that_cannot_be_read_is_a_fault_of_versions(
    store: OutageStore, tmp_path: Path
) -> None:
    """As on a disk that fails; its size is not known then."""
    upload(store, tmp_path / "made")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "files").symlink_to("files")  # to itself: it cannot be followed
    models = open_models(store, cache)
    [reason] = models.open().outages
    assert reason.startswith(f"models.cache_dir: {cache}")
    assert states(models)["digits/1"].startswith("s3://models/digits/1: models.cache_dir: ")
    assert models.cache_size is None


async def test_cache_size_after_scan_counts_complete_files(
    store: OutageStore, tmp_path: Path
) -> None:
    """Files of other processes and other stores count; there is none before the first scan."""
    first = upload(store, tmp_path / "made").total_bytes
    cache = tmp_path / "cache"
    remote = RemoteRepository(store, ModelCache(cache, 10**9, TUNING), Settings())
    (tmp_path / "beside").mkdir()
    both = RepositoryList([remote, Repository(tmp_path / "beside", Settings())])
    models = Models(Settings(), scanner=VersionScanner(both))
    before = models.cache_size
    models.open()
    assert (before, models.cache_size) == (None, CacheSize(first, 10**9))

    second = upload(store, tmp_path / "made", 2, weight=2.0).total_bytes
    open_models(store, cache).open()  # as another process does
    store.is_unavailable = True
    await models.reload()
    assert models.cache_size == CacheSize(first + second, 10**9)


def test_cache_size_of_empty_store_is_zero(store: OutageStore, tmp_path: Path) -> None:
    """The directory is made when something is stored."""
    models = open_models(store, tmp_path / "cache", 5)
    models.open()
    assert models.cache_size == CacheSize(0, 5)


def test_cache_size_without_store_is_none(tmp_path: Path) -> None:
    """A directory is served as it is."""
    models = Models(Settings(), scanner=VersionScanner(Repository(tmp_path, Settings())))
    models.open()
    assert models.cache_size is None


def test_version_in_use_by_another_process_is_kept(store: OutageStore, tmp_path: Path) -> None:
    """Its lock tells, whichever process has it."""
    size = upload(store, tmp_path / "made").total_bytes
    open_models(store, tmp_path / "cache", size + 10).open()
    [lock] = (tmp_path / "cache" / "versions").glob("*/lock")
    upload(store, tmp_path / "made", 2, weight=2.0)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        models = open_models(store, tmp_path / "cache", size + 10)
        models.open()
        assert "versions in use" in states(models)["digits/2"]
        assert lock.exists()


@pytest.mark.parametrize("left_bytes", [0, 500, 2000])
def test_object_that_is_shorter_than_manifest_says_is_no_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_bytes: int
) -> None:
    """Also where it ends before the next range; to read it again would not help."""
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://models", TUNING)
        upload(store, tmp_path / "made")
        content = (tmp_path / "made" / "digits" / "1" / "model.onnx").read_bytes()[:left_bytes]
        store.write("digits/1/model.onnx", content)
        models = open_models(store, tmp_path / "cache")
        assert models.open().outages == ()
    assert f"got {left_bytes} bytes" in states(models)["digits/1"]


def test_download_of_another_process_that_takes_too_long_is_an_outage(
    store: OutageStore, tmp_path: Path
) -> None:
    """Nothing waits for ever; whoever follows the control topic tries it again after an outage."""
    upload(store, tmp_path / "made")
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / "download.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        models = open_models(store, tmp_path / "cache")
        [outage] = models.open().outages
    assert "another process has held it" in outage
    assert "another process has held it" in states(models)["digits/1"]


@pytest.mark.parametrize("is_same_size", [False, True])
def test_damaged_file_in_cache_is_fetched_again(
    store: OutageStore, tmp_path: Path, is_same_size: bool
) -> None:
    """A file that lost its end, as after a crash of the machine, is not served; nor is one that
    somebody has written to.
    """
    manifest = upload(store, tmp_path / "made")
    open_models(store, tmp_path / "cache").open()
    damaged = tmp_path / "cache" / "files" / manifest.files["model.onnx"].sha256
    damaged.chmod(0o644)
    damaged.write_bytes(bytes(damaged.stat().st_size) if is_same_size else b"")
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert states(models) == {"digits/1": ""}


def rot(file: Path) -> None:
    """Change a byte as a failing disk does: size and time of the file stay."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_file_that_rotted_in_cache_is_fetched_again(store: OutageStore, tmp_path: Path) -> None:
    """Nothing but its content tells; the file of the same version that is sound is kept."""
    manifest = upload(store, tmp_path / "made", code="# sound")
    open_models(store, tmp_path / "cache", allow_python=True).open()
    rot(tmp_path / "cache" / "files" / manifest.files["model.onnx"].sha256)
    store.starts.clear()
    models = open_models(store, tmp_path / "cache", allow_python=True)
    models.open()
    assert states(models) == {"digits/1": ""}
    assert sum(store.starts) == sum(range(0, manifest.files["model.onnx"].bytes, 1000))


async def test_file_that_rotted_in_cache_during_outage_is_fetched_after_it(
    store: OutageStore, tmp_path: Path
) -> None:
    """The version fails meanwhile, and counts as an outage, so that the store is asked again."""
    manifest = upload(store, tmp_path / "made")
    open_models(store, tmp_path / "cache").open()
    rot(tmp_path / "cache" / "files" / manifest.files["model.onnx"].sha256)
    store.is_unavailable = True
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert "is unavailable" in states(models)["digits/1"]
    assert models.outages
    store.is_unavailable = False
    await models.reload(retry=False)
    assert states(models) == {"digits/1": ""}


@pytest.mark.parametrize(
    ("pattern", "content"),
    [
        ("*/digits/1/manifest.json", b""),
        ("*/manifest.json", b""),
        ("*/digits/model.toml", b""),
        ("*/digits/1/engine.cache", b"compiled"),
        ("*/digits/transform.py", b"import os"),
    ],
)
def test_version_that_is_not_as_it_was_built_in_cache_is_built_again(
    store: OutageStore, tmp_path: Path, pattern: str, content: bytes
) -> None:
    """A crash of the machine may lose small files, and a model may write beside its own."""
    upload(store, tmp_path / "made", config="max_batch_size = 4")
    open_models(store, tmp_path / "cache").open()
    [root] = (tmp_path / "cache" / "versions").iterdir()
    (root / pattern.removeprefix("*/")).write_bytes(content)
    store.starts.clear()
    models = open_models(store, tmp_path / "cache")
    models.open()
    assert states(models) == {"digits/1": ""}
    models.open()
    assert states(models) == {"digits/1": ""}
    assert store.starts == []


async def test_cache_that_was_deleted_meanwhile_keeps_version_in_use(
    store: OutageStore, tmp_path: Path
) -> None:
    """The version is downloaded again, and its new directory is held like the former one."""
    size = upload(store, tmp_path / "made").total_bytes
    models = open_models(store, tmp_path / "cache", size + 10)
    models.open()
    shutil.rmtree(tmp_path / "cache")
    await models.reload()
    upload(store, tmp_path / "made", 2, weight=2.0)
    other = open_models(store, tmp_path / "cache", size + 10)
    other.open()
    assert "versions in use" in states(other)["digits/2"]


def test_first_repository_with_a_model_wins(store: OutageStore, tmp_path: Path) -> None:
    """Other models come from the repositories after it."""
    upload(store, tmp_path / "made", 7)
    upload(store, tmp_path / "made", name="other")
    add_version(tmp_path / "models", "digits", 1, digits())
    settings = Settings()
    remote = RemoteRepository(store, ModelCache(tmp_path / "cache", 10**9, TUNING), settings)
    both = RepositoryList([Repository(tmp_path / "models", settings), remote])
    models = Models(settings, scanner=VersionScanner(both))
    models.open()
    assert states(models) == {"digits/1": "", "other/1": ""}


def test_overrides_of_version_in_store_go_over_packed_configuration(
    store: OutageStore, tmp_path: Path
) -> None:
    """The packed configuration, with the overrides, selects the versions to load."""
    upload(store, tmp_path / "made", 1, config="max_batch_size = 4\nprobe = false")
    upload(store, tmp_path / "made", 2, config="max_batch_size = 4\nprobe = false")
    models = open_models(store, tmp_path / "cache")
    models.want({"digits": WantedModel(versions=["1"], default="1", overrides=EIGHT)})
    models.open()
    config = models.catalog.lookup("digits").config
    assert (config.max_batch_size, config.probe) == (8, False)

    remote = RemoteRepository(store, ModelCache(tmp_path / "cache", 10**9, TUNING), Settings())
    assert remote.select("digits", EIGHT) == [2]
    assert RepositoryList([remote]).select("digits", {"versions": "all"}) == [1, 2]
    with pytest.raises(ConfigurationError, match="model: expected one of the repository, digits"):
        RepositoryList([remote]).select("other", {})


def test_index_lists_versions_where_store_has_no_listing() -> None:
    """HTTPS knows objects by name only."""
    objects = MemoryStore()
    store = Store(objects, "https://example.org", has_index=True, tuning=TUNING)
    obstore.put(objects, "index.json", json.dumps({"digits": ["2", "10"]}).encode())
    assert store.list_versions() == {"digits": [2, 10]}


class Interrupted(Store):
    """A store to which others push after each of its listings, until the pushes are used up."""

    def __init__(self, objects: ObjectStore, pushes: Sequence[Callable[[], object]]) -> None:
        super().__init__(objects, "s3://models", tuning=TUNING)
        self._pushes = [*pushes]

    def list_versions(self, within_s: float | None = None) -> dict[str, list[int]]:
        found = super().list_versions(within_s)
        if self._pushes:
            self._pushes.pop()()
        return found


def pack(repository: Path, number: int, weight: float = 1.0) -> Path:
    """Return the directory of a packed version of `digits`."""
    directory = add_version(repository, "digits", number, digits(weight))
    config = read_model_config(repository / "digits" / "model.toml", Settings())
    signature = read_signature(FoundVersion(str(number), directory, ""), config)
    write_manifest(directory, make_manifest(directory, config, signature, CREATED, {}))
    return directory


def read_index(objects: ObjectStore) -> Any:
    return json.loads(Store(objects, "s3://models").read("index.json"))


@pytest.mark.parametrize("is_directory", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_push_during_another_push_leaves_both_versions_in_index(
    tmp_path: Path, is_directory: bool, is_first: bool
) -> None:
    """The other push writes the index after this one has listed the versions; a directory cannot
    compare the index when it is written.
    """
    made = {number: pack(tmp_path / "made", number) for number in (1, 2, 3)}
    stores = tmp_path / "store"
    objects = LocalStore(stores, mkdir=True) if is_directory else MemoryStore()
    if not is_first:
        push_version(made[3], Store(objects, "s3://models"))
    other = partial(push_version, made[2], Store(objects, "s3://models"))
    push_version(made[1], Interrupted(objects, [other]))
    assert read_index(objects) == {"digits": ["1", "2"] if is_first else ["1", "2", "3"]}


def test_push_whose_index_others_write_at_each_attempt_is_refused(tmp_path: Path) -> None:
    """The version is there, and the error says what to do; the same push again lists it."""
    made = pack(tmp_path / "made", 1)
    objects = MemoryStore()
    others = [partial(obstore.put, objects, "index.json", b"{}")] * 2
    store = Interrupted(objects, others)
    with pytest.raises(ObjectChanged, match="each of 2 attempts; push again"):
        push_version(made, store, ModelTuning(store_index_attempts=2))
    push_version(made, store)
    assert read_index(objects) == {"digits": ["1"]}


class Overtaken(Store):
    """A store to which another push of the same version goes before the first file of this one."""

    def __init__(self, objects: ObjectStore, push: Callable[[], object]) -> None:
        super().__init__(objects, "s3://models", tuning=TUNING)
        self._pushes = [push]

    def write(self, key: str, content: bytes | Path) -> None:
        if self._pushes:
            self._pushes.pop()()
        super().write(key, content)


@pytest.mark.parametrize("is_directory", [False, True])
def test_push_overtaken_by_another_one_of_the_version_is_refused(
    tmp_path: Path, is_directory: bool
) -> None:
    """Its manifest does not go over the other's, whose caller was told that it is there."""
    objects = LocalStore(tmp_path / "store", mkdir=True) if is_directory else MemoryStore()
    mine = pack(tmp_path / "mine", 1)
    other = pack(tmp_path / "other", 1, weight=2.0)
    store = Overtaken(objects, partial(push_version, other, Store(objects, "s3://models")))
    with pytest.raises(ConfigurationError, match="expected no other push of this version, got one"):
        push_version(mine, store)
    manifest = (other / "manifest.json").read_bytes()
    assert Store(objects, "s3://models").read("digits/1/manifest.json") == manifest


def test_push_overtaken_by_one_of_the_same_content_is_done(tmp_path: Path) -> None:
    """So is one whose first attempt to write the manifest arrived, but not the answer to it."""
    objects, made = MemoryStore(), pack(tmp_path / "made", 1)
    push_version(made, Overtaken(objects, partial(push_version, made, Store(objects, "s3://m"))))
    assert read_index(objects) == {"digits": ["1"]}


def test_pull_during_another_pull_of_the_version_leaves_that_one_alone(
    store: OutageStore, tmp_path: Path
) -> None:
    """Both would write the same files; the later one is refused, and the first one goes on."""
    manifest = upload(store, tmp_path / "made")
    refusals: list[ConfigurationError] = []

    class Observed(OutageStore):
        def read_range(self, key: str, start: int, length: int) -> bytes:
            with pytest.raises(ConfigurationError) as caught:
                pull_version(store, "digits", "1", tmp_path / "models", Trust())
            refusals.append(caught.value)
            return store.read_range(key, start, length)

    observed = Observed()
    observed.write("digits/1/manifest.json", store.read("digits/1/manifest.json"))
    assert pull_version(observed, "digits", "1", tmp_path / "models", Trust()) == manifest
    assert {"expected no other pull of this version" in str(each) for each in refusals} == {True}
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["digits"]


def test_pull_removes_what_a_killed_one_has_left(store: OutageStore, tmp_path: Path) -> None:
    """Its files may be as large as the version, and no others are made for the same one."""
    upload(store, tmp_path / "made")
    left = tmp_path / "models" / ".pull-digits-1" / "made" / "digits" / "1"
    left.mkdir(parents=True)
    (left / "extra").touch()
    pull_version(store, "digits", "1", tmp_path / "models", Trust())
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["digits"]
    assert not (tmp_path / "models" / "digits" / "1" / "extra").exists()


def test_unreachable_store_is_asked_again_after_pauses() -> None:
    """The number of attempts, and the pauses, are given."""
    pauses: list[float] = []
    tuning = ModelTuning(store_attempts=3)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # bound, so that nobody else gets the port, but not listening
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        store = Store(s3(endpoint), "s3://models", tuning=tuning, sleep=pauses.append)
        with pytest.raises(StoreUnavailable, match="s3://models"):
            store.read("index.json")
    assert len(pauses) == 2


def test_equal_errors_of_store_have_equal_texts() -> None:
    """The library says how long each request took, and a poll logs what is new."""
    tuning = ModelTuning(store_attempts=1)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        store = Store(s3(f"http://127.0.0.1:{deaf.getsockname()[1]}"), "s3://models", tuning=tuning)
        texts = set()
        for _ in range(5):
            with pytest.raises(StoreUnavailable) as raised:
                store.list_versions()
            texts.add(str(raised.value))
    assert len(texts) == 1


def test_process_started_while_store_does_not_answer_serves_from_cache(
    store: OutageStore, tmp_path: Path
) -> None:
    """A store that takes connections and says nothing is waited for only for the given time."""
    upload(store, tmp_path / "made")
    open_models(store, tmp_path / "cache").open()
    tuning = ModelTuning(store_cached_s=0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hanging = Store(s3(endpoint), "s3://models", tuning=tuning)
        cache = ModelCache(tmp_path / "cache", 10**9, TUNING)
        remote = RemoteRepository(hanging, cache, Settings(), tuning)
        models = Models(Settings(), scanner=VersionScanner(remote))
        models.open()
    assert states(models) == {"digits/1": ""}
    assert remote.outages == ("s3://models: TimeoutError: no answer in time",)


def s3(endpoint: str) -> S3Store:
    """The library's store for a bucket at an address."""
    return S3Store(
        "models",
        endpoint=endpoint,
        access_key_id="a",
        secret_access_key="b",
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def cached(digest: str, used_s: float, size: int, *, in_use: bool = False) -> Cached:
    """A version of one file of its own."""
    return Cached(digest, used_s, in_use, {digest: size})


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (30, Room((), 20, 30)),
        (29, Room((cached("old", 1, 10),), 10, 20)),
        (19, Room((cached("old", 1, 10), cached("new", 2, 10)), 0, 10)),
        (9, Room((), 0, 10)),
    ],
    ids=["fits", "one-goes", "both-go", "never-fits"],
)
def test_longest_unused_versions_make_room(limit: int, expected: Room) -> None:
    """Only as many as needed are removed; none if even all of them are not enough."""
    room = make_room([cached("new", 2, 10), cached("old", 1, 10)], {"wanted": 10}, limit)
    assert room == expected


def test_shared_file_counts_once() -> None:
    """A version that shares its files with another one needs no room."""
    one = Cached("one", 1, False, {"shared": 10, "own": 5})
    assert make_room([one], {"shared": 10}, 15) == Room((), 15, 15)


def test_version_in_use_does_not_make_room() -> None:
    """However long ago it was touched."""
    room = make_room([cached("used", 1, 10, in_use=True)], {"wanted": 10}, 15)
    assert room == Room((), 10, 20)


@pytest.mark.parametrize(
    ("repository", "text"),
    [
        ("ftp://host/models", "got ftp://"),
        ("hdfs://host/models", "got hdfs://"),
        ("s3://", "expected s3://NAME/PATH"),
        ("https://user:secret@host/models", "without credentials"),
        ([], "expected at least one"),
        (3, "expected a directory or a URL, got int"),
        (["models", "ftp://host"], "got ftp://"),
    ],
    ids=["ftp", "hdfs", "no-bucket", "credentials", "none", "number", "in-list"],
)
def test_repository_that_is_neither_directory_nor_store_is_refused(
    repository: object, text: str
) -> None:
    """The settings say so before anything is opened, without showing credentials."""
    with pytest.raises(ConfigurationError, match=text) as caught:
        settings_with(repository=repository)
    assert "secret" not in str(caught.value)


def test_repositories_are_directories_and_urls() -> None:
    """A path without a scheme is a directory."""
    settings = settings_with(repository=["models", "s3://bucket/models/", "/srv/models"])
    assert settings.models.locations == (Path("models"), "s3://bucket/models", Path("/srv/models"))
    with pytest.raises(ConfigurationError, match="expected a directory here"):
        _ = settings.models.directory
