"""Raw payloads on their way to a model's inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import make_model_config
from headrace.models.inputs.binding import Binder
from headrace.models.inputs.transforms import Transform, make_transform
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import to_array
from tests.unit.models.requests import spec

OUTPUT = spec("y", "FP32", [-1])


def model_of(*inputs: TensorSpec) -> Signature:
    """A model with these inputs."""
    return make_signature(inputs, [OUTPUT])


def transform_of(kind: str, signature: Signature, directory: Path = Path()) -> Transform:
    """The transform of a model whose configuration names it."""
    config = make_model_config({"transform": kind} if kind else {}, make_settings({}))
    return make_transform(directory, config, signature)


def python_transform(directory: Path, body: str) -> Transform:
    """A user's transform with this body."""
    source = f"import numpy as np\n\ndef transform(payload, content_type):\n    {body}\n"
    (directory / "transform.py").write_text(source, encoding="utf-8")
    return transform_of("python", model_of(spec("x", "UINT8", [-1, -1])), directory)


def refusal(transform: Transform, payload: bytes = b"payload") -> str:
    """The message with which a payload is refused as an invalid request."""
    with pytest.raises(Rejected) as caught:
        transform(payload, "image/jpeg")
    assert caught.value.code == Code.INVALID_REQUEST
    return caught.value.message


def test_text_payload_becomes_one_element() -> None:
    """The whole payload is one string, which the model's signature then takes."""
    signature = model_of(spec("text", "BYTES", [-1, 1]))
    inputs = transform_of("text", signature)("Größe".encode(), "text/plain")
    bound = Binder(signature).bind(inputs)
    assert to_array(bound.tensors[0]).tolist() == [["Größe".encode()]]


def test_text_payload_of_other_encoding_is_refused() -> None:
    """The byte and its place are told."""
    transform = transform_of("text", model_of(spec("text", "BYTES", [-1])))
    assert refusal(transform, b"a\xff") == "payload: expected UTF-8, got byte 0xff at 1"


def test_octet_payload_becomes_row_of_bytes() -> None:
    """A UINT8 input takes the payload as a row of its length."""
    signature = model_of(spec("image", "UINT8", [-1, -1]))
    [given] = transform_of("octets", signature)(b"\x01\x02\x03", "image/jpeg")
    assert (given.datatype, given.shape, bytes(given.data)) == ("UINT8", [1, 3], b"\x01\x02\x03")


def test_octet_payload_becomes_element_where_configured() -> None:
    """A BYTES input takes the payload as an element, whatever is in it."""
    [given] = transform_of("octets", model_of(spec("file", "BYTES", [-1])))(b"\xff\0", "")
    array = to_array(Tensor(given.name, given.datatype, tuple(given.shape), given.data))
    assert array.tolist() == [b"\xff\0"]


@pytest.mark.parametrize(
    ("kind", "signature", "message"),
    [
        ("text", model_of(spec("x", "FP32", [-1])), "single input of BYTES, got x FP32"),
        ("octets", model_of(spec("x", "FP32", [-1])), "of BYTES or UINT8, got x FP32"),
        (
            "text",
            model_of(spec("a", "BYTES", [-1]), spec("b", "BYTES", [-1])),
            "single input of BYTES, got a BYTES, b BYTES",
        ),
    ],
    ids=["text", "octets", "two inputs"],
)
def test_transform_not_fitting_model_is_fault(
    kind: str, signature: Signature, message: str
) -> None:
    """It is found when the model is opened, not by the first request."""
    with pytest.raises(ConfigurationError, match=message):
        transform_of(kind, signature)


def test_payload_without_transform_is_refused() -> None:
    """The message says what the model does take."""
    transform = transform_of("", model_of(spec("x", "FP32", [-1])))
    assert refusal(transform) == (
        "content-type: expected application/msgpack or application/json, as the model has no "
        "transform, got image/jpeg"
    )


def test_python_transform_makes_inputs(tmp_path: Path) -> None:
    """It gets the payload and the content type, and gives arrays by name."""
    transform = python_transform(
        tmp_path, "return {'x': np.array([[len(payload), len(content_type)]], '>i2')}"
    )
    [given] = transform(b"abc", "audio/wav")
    assert (given.name, given.datatype, given.shape) == ("x", "INT16", [1, 2])
    assert np.frombuffer(given.data, "<i2").tolist() == [3, 9]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('no such label')", "transform: KeyError: 'no such label'"),
        ("return None", "transform: expected a dict of arrays, got NoneType"),
        ("return {'x': 3}", "transform: expected a dict of arrays by name, got 'x': int"),
    ],
    ids=["raises", "no dict", "no arrays"],
)
def test_faulty_python_transform_refuses_request(tmp_path: Path, body: str, message: str) -> None:
    """A request on which a user's code fails is answered with the reason."""
    assert refusal(python_transform(tmp_path, body)) == message


def test_python_transform_may_reuse_its_array(tmp_path: Path) -> None:
    """A request that waits for its batch keeps what was made of its own payload."""
    body = (
        "transform.memory = getattr(transform, 'memory', np.zeros((1, 2), np.uint8))\n"
        "    transform.memory[:] = list(payload)\n"
        "    return {'x': transform.memory}"
    )
    transform = python_transform(tmp_path, body)
    [first] = transform(b"\x01\x02", "")
    transform(b"\x03\x04", "")
    assert bytes(first.data) == b"\x01\x02"


def test_refusal_by_python_transform_keeps_its_message(tmp_path: Path) -> None:
    """A transform may refuse with a code of its own."""
    transform = python_transform(
        tmp_path,
        "from headrace.errors import Code, Rejected; raise Rejected(Code.TOO_LARGE, 'too much')",
    )
    with pytest.raises(Rejected, match="TOO_LARGE: too much"):
        transform(b"", "")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "expected a Python file, got none"),
        ("x = 1", r"transform\.py: expected transform, got none"),
        ("1 / 0", r"transform\.py: ZeroDivisionError: division by zero"),
        ("def", r"transform\.py: SyntaxError"),
    ],
    ids=["no file", "no function", "raises", "syntax"],
)
def test_unusable_transform_file_is_fault(tmp_path: Path, source: str | None, message: str) -> None:
    """It is found when the model is opened."""
    if source is not None:
        (tmp_path / "transform.py").write_text(source, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=message):
        transform_of("python", model_of(spec("x", "FP32", [-1])), tmp_path)


def test_user_code_is_slow_and_texts_are_not(tmp_path: Path) -> None:
    """Only what may hold the event loop goes to a thread, however large a text is."""
    text = transform_of("text", model_of(spec("text", "BYTES", [-1, 1])))
    python = python_transform(tmp_path, "return {}")
    assert not text.is_slow(b"a" * 100, "text/plain", 10)
    assert python.is_slow(b"a", "text/plain", 10)
