"""The digits model of the demo is what its metadata says."""

from __future__ import annotations

import re
from importlib.resources import files

import numpy as np
import onnx
import onnxruntime

DEMO = files("headrace.tools.demo")
MODEL = DEMO.joinpath("models/digits/1/model.onnx").read_bytes()


def test_digits_model_reaches_its_stated_accuracy() -> None:
    """ONNX Runtime gets as many test images right as the model's metadata says."""
    with DEMO.joinpath("digits_test.npz").open("rb") as file, np.load(file) as images:
        pixels, labels = images["pixels"].astype(np.float32), images["labels"]
    session = onnxruntime.InferenceSession(MODEL)
    probabilities, answered = session.run(["probabilities", "label"], {"pixels": pixels})
    stated = {entry.key: entry.value for entry in onnx.load_from_string(MODEL).metadata_props}
    match = re.match(r"(\d+) of (\d+) held-out images", stated["test_accuracy"])
    assert match is not None
    assert (int(np.sum(answered == labels)), len(labels)) == (int(match[1]), int(match[2]))
    np.testing.assert_array_equal(probabilities.argmax(axis=1), answered)


def test_digits_model_file_is_small() -> None:
    """The file stays under 50 KB."""
    assert len(MODEL) < 50_000
