"""Images that `[transform.image]` converts per second of processor time, beside a plain loop with
the same libraries.

    python -m benchmarks.images [--pairs N]

A JPEG of 640 x 480 pixels becomes a row of UINT8 [224, 224, 3], one after the other on one thread.
The plain loop decodes, resizes and copies, and checks nothing. Both alternate, so that other load
on the machine affects both, and each pair has a ratio.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from benchmarks.machine import describe_machine
from benchmarks.results import RESULTS, record
from headrace.models.inputs.images import Images
from headrace.models.media_config import ImageTransform
from headrace.models.signature import TensorSpec, make_signature

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    found = measure(parser.parse_args().pairs)
    record(RESULTS / "images.json", {"machine": describe_machine(), "found": found})
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
