"""Images that `[transform.image]` converts per second of processor time, beside a plain loop with
the same libraries.

    python -m benchmarks.images [--pairs N]

A JPEG of 640 x 480 pixels becomes a row of UINT8 [224, 224, 3], one after the other on one thread.
The plain loop decodes, resizes and copies, and checks nothing. Both alternate, so that other load
on the machine affects both, and each pair has a ratio.

Likewise the workers of ingest, threads and child processes: images per second of two workers and of
one, by the clock, and per second of processor time of one worker beside the plain loop.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import simplejpeg
from onnx import TensorProto, helper
from PIL import Image
from prometheus_client import CollectorRegistry

from benchmarks.machine import describe_machine
from benchmarks.results import RESULTS, record
from headrace.config import make_settings
from headrace.models.inputs.images import Images
from headrace.models.media_config import ImageTransform
from headrace.models.registry import Models
from headrace.models.signature import TensorSpec, make_signature
from headrace.models.version import ModelVersion
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import NO_HEADERS
from headrace.protocol.messages import Request
from headrace.telemetry.metrics import Metrics
from headrace.transforms.process import TransformProcess
from headrace.transforms.workers import PendingTransform, TransformPool, TransformThread

IMAGES = 50
SIDE = 224


def _photo() -> bytes:
    """Return a JPEG with shapes of all sizes and some noise, of about 60 KB."""
    rng = np.random.default_rng(19)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8))
    smooth = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC)).astype(int)
    pixels = (smooth + rng.integers(-8, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def _plain(photo: bytes) -> object:
    pixels = simplejpeg.decode_jpeg(photo)
    image = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(image)[np.newaxis].tobytes()


def _time(convert: Callable[[bytes], object], photo: bytes) -> float:
    began_s = time.thread_time()
    for _ in range(IMAGES):
        convert(photo)
    return IMAGES / (time.thread_time() - began_s)


def measure(pairs: int) -> dict[str, Any]:
    """Return images per second of both, and the median and the range of the ratios of pairs."""
    spec = TensorSpec("images", "UINT8", (-1, SIDE, SIDE, 3))
    signature = make_signature([spec], [TensorSpec("scores", "FP32", (-1, 10))])
    images, photo = Images(ImageTransform(), signature), _photo()
    measured = [
        (_time(lambda photo: images(photo, "image/jpeg"), photo), _time(_plain, photo))
        for _ in range(pairs + 1)
    ][1:]
    ratios = sorted(ours / plain for ours, plain in measured)
    return {
        "photo_bytes": len(photo),
        "pairs": pairs,
        "transform_per_s": median(ours for ours, _ in measured),
        "plain_per_s": median(plain for _, plain in measured),
        "ratio": median(ratios),
        "lowest_ratio": ratios[0],
        "highest_ratio": ratios[-1],
    }


def _pool(isolation: str, workers: int) -> TransformPool:
    if isolation == "thread":
        return TransformPool([TransformThread() for _ in range(workers)])
    metrics = Metrics(CollectorRegistry())
    return TransformPool([TransformProcess(3, 1 << 30, metrics) for _ in range(workers)])


async def _convert_all(pool: TransformPool, version: ModelVersion, photo: bytes) -> None:
    payloads = [
        PendingTransform(
            Request(NULL_ACK, 0, place, place - 1, 0, None, photo, [], NO_HEADERS),
            version,
            photo,
            "image/jpeg",
        )
        for place in range(2 * IMAGES)
    ]
    left = payloads
    while left:
        left = left[await pool.run(left) :]
    assert all(payload.inputs is not None for payload in payloads)


def _processor_s(children: Sequence[int]) -> float:
    """Return the processor time of this process, and of children that still run."""
    ticks = 0
    for child in children:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _children() -> list[int]:
    threads = Path("/proc/self/task").glob("*/children")
    return [int(child) for each in threads for child in each.read_text().split()]


def _version(directory: Path) -> ModelVersion:
    """Return a version of a model that answers with the images."""
    shape: list[str | int | None] = ["batch", SIDE, SIDE, 3]
    images, same = (
        helper.make_tensor_value_info(name, TensorProto.UINT8, shape) for name in ("x", "y")
    )
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "photos", [images], [same])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    (directory / "photos" / "1").mkdir(parents=True)
    (directory / "photos" / "1" / "model.onnx").write_bytes(model.SerializeToString())
    (directory / "photos" / "model.toml").write_text("[transform.image]\n")
    models = Models(make_settings({"models": {"repository": str(directory)}}))
    models.open()
    return models.catalog.lookup("photos", None)


async def measure_workers(pairs: int, isolation: str) -> dict[str, Any]:
    """Return what two workers do in the time of one, and one for the time of the plain loop."""
    photo, images = _photo(), 2 * IMAGES
    with TemporaryDirectory() as directory:
        version = _version(Path(directory))
        with closing(_pool(isolation, 1)) as one, closing(_pool(isolation, 2)) as two:
            for pool in (one, two, two):  # the first payloads start the workers
                await _convert_all(pool, version, photo)
            children = _children()
            speed, cost = [], []
            for _ in range(pairs):
                began_s, began_cpu_s = time.perf_counter(), _processor_s(children)
                await _convert_all(one, version, photo)
                one_s = time.perf_counter() - began_s
                one_cpu_s = _processor_s(children) - began_cpu_s
                began_s = time.perf_counter()
                await _convert_all(two, version, photo)
                speed.append(one_s / (time.perf_counter() - began_s))
                cost.append(images / one_cpu_s / _time(_plain, photo))
    return {
        "isolation": isolation,
        "pairs": pairs,
        "two_against_one": median(speed),
        "two_against_one_range": [min(speed), max(speed)],
        "processor_time_against_plain": median(cost),
        "processor_time_against_plain_range": [min(cost), max(cost)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    found = measure(pairs)
    workers = [
        asyncio.run(measure_workers(pairs, isolation)) for isolation in ("thread", "process")
    ]
    results = {"machine": describe_machine(), "found": found, "workers": workers}
    record(RESULTS / "images.json", results)
    for each in (found, *workers):
        for name, value in each.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
