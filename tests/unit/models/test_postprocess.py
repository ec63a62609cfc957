"""A user's code behind the model: what it gets and may return, and settings that do not fit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import ModelConfig, PythonAnswer
from headrace.models.postprocess import (
    PayloadRequest,
    Postprocess,
    PostprocessSource,
    pack,
    plan_returned,
)
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.messages import InputTensor, Tensor, whole_answer
from headrace.protocol.tensors import from_array, to_array

SIGNATURE = make_signature(
    [TensorSpec("x", "FP32", (-1, 2))],
    [TensorSpec("y", "FP32", (-1, 2)), TensorSpec("names", "BYTES", (-1,))],
)
ARRAYS = PayloadRequest(b"payload", "text/csv", "")
ANSWER = ARRAYS._replace(answer_type="text/plain")
OUTPUTS = {
    "y": np.array([[1, 2], [3, 4]], np.float32),
    "names": np.array([b"a", b"b"], dtype=object),
}


def made(directory: Path, body: str, returned: Signature = SIGNATURE) -> Postprocess:
    """A postprocess with this body."""
    text = f"import numpy as np\n\ndef postprocess(outputs, request):\n    {body}\n"
    (directory / "postprocess.py").write_text(text)
    return PostprocessSource(directory, returned, 10.0).make()


def arrays_of(tensors: list[InputTensor]) -> dict[str, Any]:
    """The values of tensors by name."""
    return {
        each.name: to_array(Tensor(each.name, each.datatype, tuple(each.shape), each.data)).tolist()
        for each in tensors
    }


def test_function_gets_outputs_and_request(tmp_path: Path) -> None:
    """Outputs by name, and the payload with its content type; further arrays are dropped."""
    postprocess = made(
        tmp_path,
        'return {"y": outputs["y"] * len(request.payload), "names": outputs["names"], '
        '"more": np.zeros(1)} if request.content_type == "text/csv" else None',
    )

    found = arrays_of(postprocess.apply(OUTPUTS, ARRAYS, 2))

    assert found == {"y": [[7, 14], [21, 28]], "names": [b"a", b"b"]}


def test_outputs_are_read_only(tmp_path: Path) -> None:
    """On a thread as in a child process, where they are views of what was received."""
    postprocess = made(tmp_path, "outputs['y'][0, 0] = 0")

    with pytest.raises(Rejected, match="ValueError: assignment destination is read-only"):
        postprocess.apply({name: array.copy() for name, array in OUTPUTS.items()}, ARRAYS, 2)


def test_packed_arguments_give_the_same(tmp_path: Path) -> None:
    """A child process gets packed arguments and a pickled source, and returns the same outputs."""
    postprocess = made(tmp_path, "return outputs")
    source = PostprocessSource(tmp_path, SIGNATURE, 10.0)
    other = pickle.loads(pickle.dumps(source)).make()
    tensors = tuple(from_array(name, array) for name, array in OUTPUTS.items())

    found = other(pack(tensors, ARRAYS, 2), "")

    assert arrays_of(found) == arrays_of(postprocess.apply(OUTPUTS, ARRAYS, 2))


def test_returned_arrays_are_copied(tmp_path: Path) -> None:
    """The function may return one array again and again."""
    postprocess = made(
        tmp_path,
        "kept = globals().setdefault('kept', outputs['y'].copy()); kept += 1; "
        "return {**outputs, 'y': kept}",
    )

    first = postprocess.apply(OUTPUTS, ARRAYS, 2)
    postprocess.apply(OUTPUTS, ARRAYS, 2)

    assert arrays_of(first)["y"] == [[2, 3], [4, 5]]


def test_function_returns_answer_itself(tmp_path: Path) -> None:
    """The answer has the content type that the function is asked for."""
    postprocess = made(tmp_path, "return bytearray(request.answer_type.encode())")

    (tensor,) = postprocess.apply(OUTPUTS, ANSWER, 2)

    assert ((tensor.name, tensor.datatype, tuple(tensor.shape)),) == whole_answer("text/plain")
    assert bytes(tensor.data) == b"\x0a\0\0\0text/plain"


@pytest.mark.parametrize(
    ("body", "request_", "message"),
    [
        ("raise ValueError('no')", ARRAYS, "postprocess: ValueError: no"),
        ("return None", ARRAYS, "postprocess: expected a dict of arrays by name, got NoneType"),
        ("return {'y': [1]}", ARRAYS, "postprocess: expected a dict of arrays by name, got dict"),
        ("return {}", ARRAYS, "postprocess: outputs: expected y, got none"),
        (
            "return {**outputs, 'y': outputs['y'].astype(int)}",
            ARRAYS,
            "postprocess: output y: expected FP32, got INT64",
        ),
        (
            "return {**outputs, 'y': outputs['y'][:1]}",
            ARRAYS,
            "postprocess: output y: expected 2 rows in dimension 0, got shape [1, 2]",
        ),
        (
            "return {**outputs, 'y': outputs['y'][:, :1]}",
            ARRAYS,
            "postprocess: output y: expected shape [-1, 2], got [2, 1]",
        ),
        (
            "return {**outputs, 'names': np.array([1, 'b'], object)}",
            ARRAYS,
            "postprocess: output names: expected bytes or str, got int at element 0",
        ),
        ("return 'text'", ANSWER, "postprocess: expected bytes of text/plain, got str"),
        ("return outputs", ANSWER, "postprocess: expected bytes of text/plain, got dict"),
    ],
)
def test_wrong_result_fails_the_request(
    tmp_path: Path, body: str, request_: PayloadRequest, message: str
) -> None:
    """With the code of a model that failed."""
    postprocess = made(tmp_path, body)

    with pytest.raises(Rejected) as raised:
        postprocess.apply(OUTPUTS, request_, 2)

    assert (raised.value.code, raised.value.message) == (Code.MODEL_FAILED, message)


def test_refusal_of_function_keeps_its_code(tmp_path: Path) -> None:
    """A postprocess that raises a refusal decides its code, like a transform."""
    postprocess = made(
        tmp_path,
        "from headrace.errors import Code, Rejected; raise Rejected(Code.TOO_LARGE, 'too many')",
    )

    with pytest.raises(Rejected, match="TOO_LARGE: too many"):
        postprocess.apply(OUTPUTS, ARRAYS, 2)


def test_outputs_without_rows_are_not_counted(tmp_path: Path) -> None:
    """A model may have no batch dimension."""
    postprocess = made(tmp_path, "return {**outputs, 'y': outputs['y'][:1]}")

    assert arrays_of(postprocess.apply(OUTPUTS, ARRAYS, None))["y"] == [[1, 2]]


@pytest.mark.parametrize("text", ["", "postprocess = 1\n", "raise SystemExit\n", None])
def test_file_without_the_function_is_refused(tmp_path: Path, text: str | None) -> None:
    """When the version is opened."""
    if text is not None:
        (tmp_path / "postprocess.py").write_text(text)

    with pytest.raises(ConfigurationError, match=r"postprocess\.py: "):
        PostprocessSource(tmp_path, SIGNATURE, 10.0).make()


TABLE = {"transform": {"image": {"max_images": 1}}}
BOXES = [{"name": "boxes", "datatype": "FP32", "shape": [-1, 5, 4]}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"answer": {}, **TABLE}, "or answer.python"),
        ({"answer": {"python": {}}}, "expected transform beside it"),
        (
            {"answer": {"python": {"content_types": ["a/b"]}, "mask": {}}, **TABLE},
            "answer.mask: expected no answer.python.content_types beside it",
        ),
        (
            {"answer": {"python": {"content_types": ["a/b"], "outputs": BOXES}}, **TABLE},
            "expected one of outputs and content_types",
        ),
        ({"answer": {"python": {"content_types": ["jpeg"]}}, **TABLE}, "match pattern"),
        (
            {
                "answer": {"python": {"content_types": ["a/b"]}},
                "transform": {"record": {"inputs": {"x": [{"path": "a"}]}, "pass_through": True}},
            },
            "expected no transform.record.pass_through",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    values: dict[str, Any], message: str
) -> None:
    """In the configuration."""
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(values)


def test_function_may_stand_before_each_form_and_alone() -> None:
    """A postprocess may precede any form of answer, including records with the outputs in them."""
    record = {"record": {"inputs": {"x": [{"path": "a"}]}, "pass_through": True}}
    for values in (
        {"answer": {"python": {}}, **TABLE},
        {"answer": {"python": {}, "mask": {}}, **TABLE},
        {"answer": {"python": {"outputs": BOXES}, "boxes": {}}, **TABLE},
        {"answer": {"python": {}}, "transform": record},
    ):
        config = ModelConfig.model_validate(values)
        assert config.opens_with_code
        assert config.code_beside == {"postprocess.py"}


def test_returned_outputs_replace_those_of_the_model() -> None:
    """They need rows if the model has them."""
    config = PythonAnswer.model_validate({"outputs": BOXES})
    without = PythonAnswer.model_validate({"outputs": [{**BOXES[0], "shape": [5, 4]}]})

    assert plan_returned(SIGNATURE, None) is SIGNATURE
    assert plan_returned(SIGNATURE, PythonAnswer()) is SIGNATURE
    returned = plan_returned(SIGNATURE, config)
    assert (returned.inputs, returned.batched) == (SIGNATURE.inputs, True)
    assert [each.name for each in returned.outputs] == ["boxes"]
    with pytest.raises(ConfigurationError, match=r"answer\.python\.outputs: expected -1"):
        plan_returned(SIGNATURE, without)
