"""Copies of packed versions between a directory and a store: `headrace models push|pull`."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import ConfigurationError
from headrace.models.packing.files import (
    find_differences,
    hash_file,
    read_manifest,
    read_model_files,
)
from headrace.models.packing.manifest import (
    MANIFEST_NAME,
    Manifest,
    compare_model_files,
    parse_manifest,
)
from headrace.models.packing.signatures import Trust, check_signature
from headrace.models.stores.store import INDEX_NAME, ObjectChanged, Store
from headrace.tuning import TUNING, ModelTuning


def push_version(directory: Path, store: Store, tuning: ModelTuning = TUNING.models) -> Manifest:
    """Copy a packed version to a store, its manifest last, and list it in the index.

    A push that was broken off is repeated from its beginning, or from the index if the manifest
    was written; until the manifest is, nobody sees the version.

    Raises:
        ConfigurationError: the version is not packed or has changed since, or the store has another
            one of that number, perhaps since this push began.
        ObjectChanged: others write the index all the time.
        StoreUnavailable: the store cannot be reached.
        OSError: a file cannot be read.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise ConfigurationError(
            f"{directory}: expected a manifest, got none; pack it first (headrace models pack)"
        )
    differences = find_differences(directory, manifest)
    if differences:
        raise ConfigurationError(f"{directory}: differs from its manifest: {differences[0]}")
    prefix = f"{manifest.model}/{manifest.version}"
    key = f"{prefix}/{MANIFEST_NAME}"
    content = (directory / MANIFEST_NAME).read_bytes()
    present = _read_if_there(store, key)
    if present is None:
        for name in manifest.files:
            store.write(f"{prefix}/{name}", directory / name)
        # The last: it makes the version count. Another push may have written its own meanwhile, and
        # so may an attempt of this one whose answer was lost.
        with suppress(ObjectChanged):
            store.replace(key, content, None)
        present = _read_if_there(store, key)
        if present != content:
            raise ConfigurationError(
                f"{store.name}/{prefix}: expected no other push of this version, got one; files of "
                "both may be there: remove them all, and push one of the two again"
            )
    if present != content:
        raise ConfigurationError(
            f"{store.name}/{prefix}: expected no version or the same one, got another one; "
            "give the new one another number"
        )
    update_index(store, tuning)
    return manifest


def _read_if_there(store: Store, key: str) -> bytes | None:
    try:
        return store.read(key)
    except FileNotFoundError:
        return None


def update_index(store: Store, tuning: ModelTuning = TUNING.models) -> None:
    """Write the index until it lists the versions that the store has.

    Others may push at the same time. What is written was listed after the index was read, and is
    not written over an index that another one wrote in between. A store that cannot compare may
    have written it nevertheless, so the index is read once more in the end.

    Raises:
        ObjectChanged: others wrote the index at each attempt.
        StoreUnavailable, ConfigurationError: see `Store`.
    """
    for _ in range(tuning.store_index_attempts):
        try:
            seen = store.read_object(INDEX_NAME)
        except FileNotFoundError:
            seen = None
        versions = store.list_versions()
        index = {name: [*map(str, numbers)] for name, numbers in versions.items()}
        content = json.dumps(index).encode()
        if seen is not None and seen.content == content:
            return
        with suppress(ObjectChanged, FileNotFoundError):
            store.replace(INDEX_NAME, content, seen)
    raise ObjectChanged(
        f"{store.name}/{INDEX_NAME}: others wrote it at each of {tuning.store_index_attempts} "
        "attempts; push again"
    )


def pull_version(
    store: Store,
    model: str,
    version: str,
    repository: Path,
    trust: Trust,
    tuning: ModelTuning = TUNING.models,
) -> Manifest:
    """Copy a version from a store to a directory of models, where it appears complete.

    Files beside the version are written if they are not there; `model.toml` is left as it is.

    Raises:
        ConfigurationError: the version is there already, or pulled by somebody else now; its
            manifest or a file is wrong, no trusted key has signed it, or a file beside it differs.
        FileNotFoundError: the store does not have it.
        StoreUnavailable: the store cannot be reached.
        OSError: a file cannot be written.
    """
    content = store.read(f"{model}/{version}/{MANIFEST_NAME}")
    manifest = parse_manifest(content)
    if (manifest.model, manifest.version) != (model, version):
        raise ConfigurationError(
            f"{store.name}/{model}/{version}: expected its own manifest, "
            f"got that of {manifest.model}/{manifest.version}"
        )
    check_signature(manifest, trust)
    target = repository / model / version
    if target.exists():
        raise ConfigurationError(f"{target}: expected no such version yet, got one")
    beside = read_model_files(target, manifest.model_files)
    differences = compare_model_files({name: manifest.model_files[name] for name in beside}, beside)
    if differences:
        raise ConfigurationError(f"{target}: {differences[0]}")
    repository.mkdir(parents=True, exist_ok=True)
    with _scratch_for(repository / f".pull-{model}-{version}") as made:
        _download(store, manifest, made / model / version, tuning)
        (made / model / version / MANIFEST_NAME).write_bytes(content)
        _put_in_place(manifest, made / model, repository / model)
    return manifest


@contextmanager
def _scratch_for(scratch: Path) -> Iterator[Path]:
    """Yield an empty directory in `scratch`, without what a pull that was killed has left there.

    Raises:
        ConfigurationError: another pull has it.
    """
    scratch.mkdir(exist_ok=True)
    lock, made = scratch / "lock", scratch / "made"
    with lock.open("a") as file:  # the kernel releases it when the process ends in any way
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = os.path.samestat(os.fstat(file.fileno()), lock.stat())
        except (BlockingIOError, FileNotFoundError):  # it may have ended, and removed the lock
            is_mine = False
        if not is_mine:
            raise ConfigurationError(f"{scratch}: expected no other pull of this version, got one")
        shutil.rmtree(made, ignore_errors=True)
        try:
            yield made
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _download(store: Store, manifest: Manifest, directory: Path, tuning: ModelTuning) -> None:
    for name, file in manifest.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        key = f"{manifest.model}/{manifest.version}/{name}"
        with path.open("wb") as target:
            while (start := target.tell()) < file.bytes:
                length = min(tuning.store_read_bytes, file.bytes - start)
                part = store.read_range(key, start, length)
                target.write(part)
                if len(part) < length:
                    break  # the object is shorter than the manifest says
        got = hash_file(path)
        if got != file:
            raise ConfigurationError(f"{store.name}/{key}: expected {file}, got {got}")


def _put_in_place(manifest: Manifest, made: Path, model: Path) -> None:
    place = model if model.exists() else made
    for name, text in manifest.model_files.items():
        path = place / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    if place is made:
        made.rename(model)
    else:
        (made / manifest.version).rename(model / manifest.version)
