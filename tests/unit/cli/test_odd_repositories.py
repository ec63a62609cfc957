"""`headrace models check` on files that no exporter writes: each is told, and hides no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace.cli.outcome import Exit
from tests.support.command_line import Call
from tests.support.models import Shape, add_version, digits, identity, make_model

Spoil = Callable[[Path], object]
"""Makes a sound model's directory an odd one."""


def saved(model: onnx.ModelProto) -> Spoil:
    """Put another model in the place of the sound one."""
    return content(model.SerializeToString())


def content(data: bytes) -> Spoil:
    """Put this into the model's file."""
    return lambda model: (model / "1" / "model.onnx").write_bytes(data)


def toml(text: str) -> Spoil:
    """Give the model this `model.toml`."""
    return lambda model: (model / "model.toml").write_text(text, encoding="utf-8")


def recorded(data: bytes) -> Spoil:
    """Give the version this file of rows."""

    def spoil(model: Path) -> None:
        (model / "1" / "warmup").mkdir()
        (model / "1" / "warmup" / "rows.npz").write_bytes(data)

    return spoil


def npz(**arrays: object) -> bytes:
    """The content of a file of arrays."""
    file = BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # no array is meant for `allow_pickle`
    return file.getvalue()


def of_shape(*shape: int | str) -> onnx.ModelProto:
    """A model of `x` to `y`, unchanged."""
    return identity("FP32", shape)


def with_latin1_name() -> bytes:
    """An ONNX file whose input has a name that is not UTF-8."""
    data: bytes = identity("FP32").SerializeToString().replace(b"\n\x01x", b"\n\x01\xff")
    return data


def classifier_with_maps() -> onnx.ModelProto:
    """`X` to `label`, and a sequence of maps, which is what skl2onnx exports by default."""
    shape: Shape = ("n", 2)
    model = make_model(
        [helper.make_node("Identity", ["X"], ["label"])],
        [("X", TensorProto.FLOAT, shape)],
        [("label", TensorProto.FLOAT, shape)],
    )
    output = model.graph.output.add(name="probabilities")
    output.type.sequence_type.elem_type.map_type.key_type = TensorProto.STRING
    return model


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (content(b""), "expected an ONNX model, got no graph"),
        (content(b"\xff" * 100), "expected an ONNX model, got another file"),
        (content(b"version https://git-lfs.github.com/spec/v1\n"), "fetch the file with `git lfs"),
        (content(with_latin1_name()), "input: expected a name in UTF-8 of 1 to 256 char"),
        (saved(of_shape("n", -5)), "input x: expected no negative dimension, got [-1, -5]"),
        (saved(of_shape("n", *[1] * 69)), "input x: expected at most 16 dimensions, got 70"),
        (saved(classifier_with_maps()), "got sequence; of scikit-learn's classifiers"),
        (toml("max_batch_size = " + "9" * 5000), "Exceeds the limit"),
        (toml("max_batch_size = 0x" + "f" * 5000), "expected at most 1000000, got a number of"),
        (toml("a = " + "[" * 5000), "expected TOML, got too many levels"),
        (lambda model: os.mkfifo(model / "model.toml"), "model.toml: expected a file, got some"),
        (recorded(b""), "expected arrays as numpy.savez writes them, got EOFError"),
        (recorded(npz(pixels=np.ones((1, 64), np.float32))[:-9]), "got BadZipFile"),
        (recorded(npz(pixels=np.array([{}]))), "got ValueError: Object arrays cannot be loaded"),
        (
            toml('sequence_buckets = [8]\nmask = "pixels"'),
            "mask: expected an input with a free dimension, got 'pixels'",
        ),
        (
            toml(f'postprocess = "argmax"\nlabels = "{"a" * 5000}"'),
            "labels: File name too long: aaa",
        ),
    ],
    ids=[
        *("empty", "garbage", "LFS", "name", "negative", "rank", "maps", "digits", "hexadecimal"),
        *("levels", "pipe", "empty rows", "cut rows", "pickle", "mask", "labels"),
    ],
)
def test_odd_model_is_listed_beside_sound_one(
    tmp_path: Path, call: Call, spoil: Spoil, message: str
) -> None:
    """The line says what was expected, without a traceback."""
    add_version(tmp_path / "models", "odd", 1, digits())
    add_version(tmp_path / "models", "sound", 1, digits())
    spoil(tmp_path / "models" / "odd")

    result = call("models", "check")

    assert result.exit_code == Exit.FAILED
    assert message in result.stdout
    assert "sound/1: ready\n" in result.stdout


def test_recorded_samples_of_different_row_counts_are_refused(tmp_path: Path, call: Call) -> None:
    """One input has two rows, and the other three."""
    shape: Shape = ("batch", 2)
    model = make_model(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [("a", TensorProto.FLOAT, shape), ("b", TensorProto.FLOAT, shape)],
        [("y", TensorProto.FLOAT, shape)],
    )
    add_version(tmp_path / "models", "odd", 1, model)
    recorded(npz(a=np.ones((2, 2), np.float32), b=np.ones((3, 2), np.float32)))(
        tmp_path / "models" / "odd"
    )
    assert "expected as many rows of each input, got 2 of a, 3 of b" in (
        call("models", "check").stdout
    )
