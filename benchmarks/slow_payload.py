"""Latency of requests with tensors while large images are transformed, and images per second.

    python -m benchmarks.slow_payload [--seconds N] [--images N]

One process with the embedded log. For the latency, a request of 1 KB is sent every 10 ms, alone and
then beside a PNG of 4000 x 3000 pixels every second, which takes a worker some hundred
milliseconds. For the throughput, JPEGs of 640 x 480 pixels are sent at once.
Both are measured after a warm-up. To compare two versions, run each in turn on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import time
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from PIL import Image

from benchmarks.embedded_load import running_pipeline
from headrace.client import Client
from headrace.config import Settings, make_settings

EVERY_S = 0.01
IMAGE_EVERY_S = 1.0
SIDE = 224


def _picture(width: int, height: int, kind: str, shapes: int) -> bytes:
    """Return an image with so many coarse shapes in each direction."""
    rng = np.random.default_rng(19)
    coarse = Image.fromarray(rng.integers(0, 256, (shapes, shapes, 3), np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


def _add_model(directory: Path, name: str, kind: int, shape: list[str | int | None]) -> None:
    """Add a model that answers with the first value of each row."""
    x = helper.make_tensor_value_info("x", kind, shape)
    y = helper.make_tensor_value_info("y", kind, ["batch", 1])
    flat = helper.make_node("Flatten", ["x"], ["flat"])
    bounds = [
        helper.make_tensor(each, TensorProto.INT64, [1], [value])
        for each, value in (("start", 0), ("end", 1), ("axis", 1))
    ]
    first = helper.make_node("Slice", ["flat", "start", "end", "axis"], ["y"])
    graph = helper.make_graph([flat, first], name, [x], [y], bounds)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    (directory / name / "1").mkdir(parents=True)
    (directory / name / "1" / "model.onnx").write_bytes(model.SerializeToString())


def _settings(directory: Path) -> Settings:
    _add_model(directory, "photos", TensorProto.UINT8, ["batch", SIDE, SIDE, 3])
    (directory / "photos" / "model.toml").write_text("[transform.image]\n")
    _add_model(directory, "plain", TensorProto.FLOAT, ["batch", 256])
    return make_settings({"topics": {"partitions": 4}, "models": {"repository": str(directory)}})


async def _time_plain(client: Client, seconds: float, image: bytes | None) -> list[float]:
    """Return the latencies of the requests with tensors, in milliseconds."""
    inputs = {"x": np.ones((1, 256), np.float32)}
    taken_ms: list[float] = []

    async def ask() -> None:
        began_s = time.perf_counter()
        await client.infer("plain", inputs, timeout_s=60)
        taken_ms.append(1000 * (time.perf_counter() - began_s))

    async with asyncio.TaskGroup() as tasks:
        began_s = time.perf_counter()
        for number in range(round(seconds / EVERY_S)):
            await asyncio.sleep(max(0.0, began_s + number * EVERY_S - time.perf_counter()))
            if image is not None and number % round(IMAGE_EVERY_S / EVERY_S) == 0:
                tasks.create_task(_send_image(client, image))
            tasks.create_task(ask())
    return taken_ms


async def _send_image(client: Client, image: bytes) -> None:
    await client.infer_raw("photos", image, "image/png", timeout_s=60)


async def measure(seconds: float, images: int) -> dict[str, Any]:
    """Return latencies without and with images, and images per second."""
    large, small = _picture(4000, 3000, "PNG", 4), _picture(640, 480, "JPEG", 40)
    with TemporaryDirectory() as directory:
        settings = _settings(Path(directory))
        async with (
            running_pipeline(settings) as log,
            Client(log=log, settings=settings) as client,
        ):
            await _time_plain(client, 1.0, large)
            began_s = time.perf_counter()
            await _send_image(client, large)
            large_s = time.perf_counter() - began_s
            alone = await _time_plain(client, seconds, None)
            beside = await _time_plain(client, seconds, large)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(images):
                    tasks.create_task(client.infer_raw("photos", small, "image/jpeg", timeout_s=60))
            took_s = time.perf_counter() - began_s
            took_cpu_s = time.process_time() - began_cpu_s
    found: dict[str, Any] = {"png_bytes": len(large), "png_ms": 1000 * large_s}
    for name, taken_ms in (("alone", alone), ("beside", beside)):
        cuts = quantiles(taken_ms, n=100)
        found |= {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}
        found[f"{name}_max_ms"] = max(taken_ms)
    return found | {
        "images_per_s": images / took_s,
        "images_per_processor_s": images / took_cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--images", type=int, default=500)
    arguments = parser.parse_args()
    for name, value in asyncio.run(measure(arguments.seconds, arguments.images)).items():
        print(f"{name}: {value:.1f}")


if __name__ == "__main__":
    main()
