"""TensorFlow Serving's `:predict` at the gateway's door for HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.gateways import Served, gateway_of
from tests.support.models import add_version, digits, identity
from tests.support.python_models import ECHO, add_whole_model

SUMS = """
class Model:
    inputs = [("a", "INT32", (-1, 2)), ("b", "INT32", (-1, 2))]
    outputs = [("sum", "INT32", (-1, 2)), ("difference", "INT32", (-1, 2))]

    def run(self, inputs):
        a, b = inputs["a"], inputs["b"]
        return {"sum": a + b, "difference": a - b}
"""
NO_TEXT = {"b64": "/w=="}
"""One byte that is no UTF-8."""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Models of one input and of two, and one of strings."""
    add_version(tmp_path, "digits", 1, digits())
    add_version(tmp_path, "INT8", 1, identity("INT8"), "probe = false")
    add_whole_model(tmp_path, "sums", SUMS)
    add_whole_model(tmp_path, "echo", ECHO)
    async with gateway_of(tmp_path) as gateway:
        yield gateway


async def predicted(served: Served, model: str, body: Any) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    reply = await served.post(f"/v1/models/{model}:predict", content)
    return reply.status, reply.json


async def test_instances_are_answered_by_row(served: Served) -> None:
    """The one output of the model is bare in each row."""
    status, answer = await predicted(served, "digits", {"instances": [[1.0] * 64, [0.0] * 64]})

    assert status == 200
    np.testing.assert_allclose(answer["predictions"], [64.0 * np.arange(10), np.zeros(10)])


async def test_inputs_are_answered_by_output(served: Served) -> None:
    """The form by column has `outputs`."""
    status, answer = await predicted(served, "INT8", {"inputs": {"x": [[1, 2], [-3, 4]]}})

    assert (status, answer) == (200, {"outputs": [[1, 2], [-3, 4]]})


async def test_several_inputs_and_outputs_are_named(served: Served) -> None:
    """In the rows of both directions, and by column."""
    rows = [{"a": [5, 6], "b": [1, 2]}, {"a": [0, 0], "b": [1, 1]}]
    columns = {"a": [[5, 6], [0, 0]], "b": [[1, 2], [1, 1]]}
    by_row = await predicted(served, "sums", {"instances": rows})
    by_column = await predicted(served, "sums", {"inputs": columns})

    expected = [{"sum": [6, 8], "difference": [4, 4]}, {"sum": [1, 1], "difference": [-1, -1]}]
    assert by_row == (200, {"predictions": expected})
    assert by_column == (
        200,
        {"outputs": {"sum": [[6, 8], [1, 1]], "difference": [[4, 4], [-1, -1]]}},
    )


async def test_strings_and_bytes_come_back(served: Served) -> None:
    """Where an element is not text, all elements of the answer are objects of base64."""
    texts = await predicted(served, "echo", {"instances": [["a", "é"]]})
    mixed = await predicted(served, "echo", {"instances": [["a", NO_TEXT]]})

    assert texts == (200, {"predictions": [["a", "é"]]})
    assert mixed == (200, {"predictions": [[{"b64": "YQ=="}, NO_TEXT]]})


async def test_version_in_path_is_asked(served: Served) -> None:
    """A version that is not there is refused."""
    content = msgspec.json.encode({"instances": [[1, 2]]})
    found = await served.post("/v1/models/INT8/versions/1:predict", content)
    missing = await served.post("/v1/models/INT8/versions/2:predict", content)

    assert (found.status, missing.status) == (200, 404)


async def test_model_status_has_fields_of_both_servers(served: Served) -> None:
    """KServe's clients read `ready`, those of TensorFlow Serving the versions' states."""
    reply = await served.get("/v1/models/INT8")

    assert (reply.json["name"], reply.json["ready"]) == ("INT8", True)
    (version,) = reply.json["model_version_status"]
    assert (version["version"], version["state"]) == ("1", "AVAILABLE")


BAD_REQUESTS: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": ("INT8", b"{", 400, "JSON"),
    "neither": ("INT8", {}, 400, "neither"),
    "both": ("INT8", {"instances": [[1, 2]], "inputs": [[1, 2]]}, 400, "both"),
    "no rows": ("INT8", {"instances": []}, 400, "at least one"),
    "instances no list": ("INT8", {"instances": 1}, 400, "instances"),
    "null": ("INT8", {"inputs": None}, 400, "an integer for INT8"),
    "ragged": ("INT8", {"instances": [[1, 2], [3]]}, 400, "instances.x.data[1]"),
    "out of range": ("INT8", {"instances": [[1, 300]]}, 400, "127"),
    "other type": ("INT8", {"instances": [[1, "a"]]}, 400, "an integer for INT8"),
    "object for number": ("INT8", {"instances": [[1, {"b64": ""}]]}, 400, "an integer for INT8"),
    "other shape": ("INT8", {"instances": [[1, 2, 3]]}, 400, "x"),
    "other name": ("INT8", {"instances": [{"z": [1, 2]}]}, 400, "an object of x"),
    "no name": ("INT8", {"inputs": {}}, 400, "an object of x, got an empty object"),
    "few names": ("INT8", {"inputs": {"y": 1, "z": 2}}, 400, 'got one of "y", "z"'),
    "many names": (
        "INT8",
        {"inputs": {str(number): 1 for number in range(1000)}},
        400,
        '"6", "7" and 992 more',
    ),
    "bare for two inputs": ("sums", {"instances": [[1, 2]]}, 400, "an object of a, b"),
    "one of two inputs": ("sums", {"inputs": {"a": [[1, 2]]}}, 400, "an object of a, b"),
    "rows of two sizes": ("sums", {"inputs": {"a": [[1, 2]], "b": []}}, 400, "b"),
    "no base64": ("echo", {"instances": [["a", {"b64": "!"}]]}, 400, "base64"),
    "number for string": ("echo", {"instances": [["a", 1]]}, 400, "BYTES"),
    "lone surrogate": ("echo", b'{"instances": [["a", "\\ud800"]]}', 400, ""),
    "deep": ("echo", b'{"instances": ' + b"[" * 500 + b"]" * 500 + b"}", 400, ""),
    "deep behind": ("echo", b'{"instances": [["a", ' + b"[" * 500 + b"]" * 500 + b"]]}", 400, ""),
    "very deep": ("echo", b'{"instances": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", 400, ""),
    "unknown model": ("letters", {"instances": [[1]]}, 404, "letters"),
}


async def test_bad_predict_request_gets_status_and_reason(served: Served) -> None:
    """Each has its status and a sentence that names the fault, and the door goes on."""
    for case, (model, body, status, text) in BAD_REQUESTS.items():
        found, answer = await predicted(served, model, body)
        told = answer["error"]
        assert (found, text in told) == (status, True), f"{case}: {told}"
    assert (await predicted(served, "INT8", {"instances": [[1, 2]]}))[0] == 200
