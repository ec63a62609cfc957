"""A process that is killed while it downloads a model from a store."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
from pathlib import Path

import pytest

from headrace.config import make_settings
from headrace.models.registry import Models
from headrace.models.repositories import open_repository
from headrace.models.scan import VersionScanner
from headrace.tuning import ModelTuning
from tests.support.command_line import Call
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.s3_bucket import S3Bucket

RANGE = 1000
TUNING = ModelTuning(store_read_bytes=RANGE, cache_lock_timeout_s=0)
MODEL = "digits/1/model.onnx"
LABELS = "digits/1/labels.txt"
DOWNLOADS = """
import sys
from headrace.config import make_settings
from headrace.models.repositories import open_repository
from headrace.tuning import ModelTuning

models = {"repository": "s3://models", "cache_dir": sys.argv[1]}
tuning = ModelTuning(store_read_bytes=int(sys.argv[2]))
open_repository(make_settings({"models": models}), tuning).scan()
"""


@pytest.mark.parametrize(
    ("held", "kept"),
    [(0, 0), (RANGE + 1, RANGE), (2 * RANGE, 2 * RANGE)],
    ids=["before-first-byte", "within-range", "between-ranges"],
)
async def test_download_of_killed_process_is_never_whole_and_is_resumed(
    held: int, kept: int, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was complete stays, and of the other one no byte is read twice."""
    cache = tmp_path / "cache"
    add_version(tmp_path / "models", "digits", 1, digits())
    (tmp_path / "models/digits/1/labels.txt").write_text("one")
    call("models", "pack", "digits")
    async with S3Bucket() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        await asyncio.to_thread(call, "models", "push", "digits", "--to", "s3://models")
        bucket.holds_from = {MODEL: held}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DOWNLOADS, str(cache), str(RANGE)
        )
        try:
            await eventually(lambda: bucket.is_holding)
        finally:
            process.kill()
            await process.wait()

        content = bucket.objects[MODEL]
        complete = {path.read_bytes() for path in (cache / "files").iterdir()}
        versions = list((cache / "versions").iterdir())
        part = cache / "partial" / hashlib.sha256(content).hexdigest()
        begun = part.read_bytes()

        bucket.holds_from, bucket.reads = {}, []
        settings = make_settings({"models": {"repository": "s3://models", "cache_dir": cache}})
        models = Models(settings, scanner=VersionScanner(open_repository(settings, TUNING)))
        await asyncio.to_thread(models.open)

    assert process.returncode == -signal.SIGKILL
    assert (complete, versions) == ({b"one"}, [])
    assert begun == content[:kept]
    starts = range(kept, len(content), RANGE)
    assert [read for read in bucket.reads if read[0] == MODEL] == [
        (MODEL, f"bytes={start}-{min(start + RANGE, len(content)) - 1}") for start in starts
    ]
    assert LABELS not in dict(bucket.reads)
    assert [each["reason"] for each in models.catalog.status()] == [""]
    assert (models.catalog.lookup("digits").directory / "model.onnx").read_bytes() == content
