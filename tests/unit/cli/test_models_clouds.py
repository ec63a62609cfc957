"""Repositories in the object stores of three clouds, through the library's own clients.

S3 is served by moto, the others are stand-ins; the environment variables are the standard ones of
each cloud.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.cli.outcome import Exit
from headrace.config import make_settings
from headrace.models.registry import Models
from headrace.models.repositories import open_repository
from headrace.models.scan import VersionScanner
from headrace.models.stores.store import ObjectChanged, Store, open_store
from tests.support.cloud_buckets import AzureContainer, GoogleBucket
from tests.support.command_line import Call
from tests.support.models import add_version, digits
from tests.support.s3_bucket import S3Bucket
from tests.support.s3_server import s3_server

LARGE_BYTES = 6 * 1024 * 1024
"""The library uploads what has more than 5 MiB in parts."""


@pytest.mark.parametrize(("scheme", "kind"), [("gs", GoogleBucket), ("az", AzureContainer)])
async def test_version_pushed_to_cloud_is_listed_served_and_pulled(
    scheme: str, kind: type[S3Bucket], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version without a manifest is not listed, and every object is below the path of the URL."""
    url = f"{scheme}://models/deep"
    add_version(tmp_path / "models", "digits", 1, digits(), "max_batch_size = 4")
    call("models", "pack", "digits")
    async with kind() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        bucket.objects["deep/digits/2/model.onnx"] = b"half of it"
        pushed = await asyncio.to_thread(call, "models", "push", "digits", "--to", url)

        settings = make_settings({"models": {"repository": url, "cache_dir": tmp_path / "cache"}})
        repository = open_repository(settings)
        listed = await asyncio.to_thread(repository.list_versions)
        models = Models(settings, scanner=VersionScanner(repository))
        await asyncio.to_thread(models.open)

        (tmp_path / "headrace.toml").write_text('[models]\nrepository = "others"\n')
        pulled = await asyncio.to_thread(call, "models", "pull", "digits", "--from", url)

    assert (pushed.exit_code, pushed.stderr) == (Exit.DONE, "")
    assert listed == {"digits": [1]}
    assert models.catalog.lookup("digits").max_batch_size == 4
    assert [each["reason"] for each in models.catalog.status()] == [""]
    assert (pulled.exit_code, pulled.stderr) == (Exit.DONE, "")
    assert call("models", "verify").stdout == "digits/1: ok\n"
    assert {key.split("/")[0] for key in bucket.objects} == {"deep"}


@pytest.mark.parametrize(
    ("scheme", "kind"), [("s3", S3Bucket), ("gs", GoogleBucket), ("az", AzureContainer)]
)
async def test_object_in_cloud_that_changed_since_it_was_read_is_not_replaced(
    scheme: str, kind: type[S3Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that was found missing counts as one that was read."""

    def replace_twice(store: Store) -> bytes:
        store.replace("index.json", b"1", None)
        with pytest.raises(ObjectChanged):
            store.replace("index.json", b"2", None)
        seen = store.read_object("index.json")
        store.replace("index.json", b"3", seen)
        with pytest.raises(ObjectChanged):
            store.replace("index.json", b"4", seen)
        return store.read("index.json")

    async with kind() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        left = await asyncio.to_thread(replace_twice, open_store(f"{scheme}://models"))
    assert left == b"3"


def test_version_pushed_to_s3_is_served_pulled_and_verified(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is uploaded in parts arrives whole, and a listing in many pages has all."""
    add_version(tmp_path / "models", "digits", 1, digits(), "max_batch_size = 4")
    large = bytes(range(256)) * (LARGE_BYTES // 256)
    (tmp_path / "models" / "digits" / "1" / "bulk.bin").write_bytes(large)
    call("models", "pack", "digits")
    url = "s3://models/deep"
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "1")
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        pushed = [call("models", "push", "digits", "--to", url) for _ in range(2)]
        (tmp_path / "models" / "digits" / "1" / "bulk.bin").write_bytes(large[1:])
        call("models", "pack", "digits")
        refused = call("models", "push", "digits", "--to", url)

        settings = make_settings({"models": {"repository": url, "cache_dir": tmp_path / "cache"}})
        models = Models(settings, scanner=VersionScanner(open_repository(settings)))
        models.open()

        (tmp_path / "headrace.toml").write_text('[models]\nrepository = "others"\n')
        pulled = call("models", "pull", "digits", "--from", url)

    assert [(each.exit_code, each.stderr) for each in (*pushed, pulled)] == [(Exit.DONE, "")] * 3
    assert "give the new one another number" in refused.stderr
    assert [each["reason"] for each in models.catalog.status()] == [""]
    served = models.catalog.lookup("digits")
    assert served.max_batch_size == 4
    assert (served.directory / "bulk.bin").read_bytes() == large
    assert call("models", "verify").stdout == "digits/1: ok\n"
