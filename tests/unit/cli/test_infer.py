"""`headrace infer` as a person calls it: usage, and what is shown of an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from headrace.cli.infer import as_protocol, as_text
from headrace.cli.outcome import Exit
from headrace.cli.settings import Invocation
from headrace.client import Client, InferenceTimeout, Response
from headrace.config import Settings
from tests.support.command_line import Call

RESPONSE = Response(
    "m",
    "2",
    "mine",
    {
        "scores": np.array([[0.5, np.nan]], np.float32),
        "label": np.array(["größer".encode()], object),
    },
    {"batch_size": 1},
    [],
)


class ScriptedClient:
    """Takes the place of a client: keeps the calls, and gives or raises what is prepared."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
        self.outcome: Response | Exception = RESPONSE

    async def infer(self, *arguments: object, **options: object) -> Response:
        return self._answer(arguments, options)

    async def infer_raw(self, *arguments: object, **options: object) -> Response:
        return self._answer(arguments, options)

    def _answer(self, arguments: tuple[object, ...], options: dict[str, object]) -> Response:
        self.calls.append((arguments, options))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def client() -> ScriptedClient:
    """The client that `headrace infer` gets."""
    return ScriptedClient()


@pytest.fixture
def call(call: Call, client: ScriptedClient) -> Call:
    """Runs a command that opens this client."""

    @asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[Client]:
        yield cast(Client, client)

    return lambda *arguments: call(*arguments, obj=Invocation(open_client=opened))


@pytest.fixture
def png(tmp_path: Path) -> str:
    """A file whose name says what it is."""
    path = tmp_path / "digit.png"
    path.write_bytes(b"\x89PNG")
    return str(path)


def test_infer_shows_outputs_with_datatype_and_shape(call: Call, client: ScriptedClient) -> None:
    """Each output is a line: name, datatype, shape, values."""
    result = call("infer", "m", "--input", "x=[[1]]")
    assert result.exit_code == Exit.DONE
    assert result.stdout.splitlines()[0] == "scores FP32 [1, 2] [[0.5, nan]]"


def test_infer_json_has_form_of_protocol(call: Call, client: ScriptedClient) -> None:
    """With `--json` the answer has the form of the Open Inference Protocol."""
    shown = json.loads(call("infer", "m", "--input", "x=[[1]]", "--json").stdout)
    assert shown == {
        "model_name": "m",
        "model_version": "2",
        "id": "mine",
        "outputs": [
            {"name": "scores", "datatype": "FP32", "shape": [1, 2], "data": [0.5, "NaN"]},
            {"name": "label", "datatype": "BYTES", "shape": [1], "data": ["größer"]},
        ],
        "parameters": {"batch_size": 1},
    }


def test_infer_shortens_long_outputs_in_text() -> None:
    """A large tensor does not fill the terminal; JSON has all of it."""
    large = RESPONSE._replace(outputs={"x": np.zeros((1, 5000), np.float32)})
    assert len(as_text(large)) < 200
    assert len(as_protocol(large)["outputs"][0]["data"]) == 5000


def test_infer_options_reach_client(call: Call, client: ScriptedClient) -> None:
    """Timeout and version are the client's."""
    call("infer", "m", "--input", "x=[[1]]", "--timeout", "2.5", "--version", "3")
    ((_, options),) = client.calls
    assert options == {"timeout_s": 2.5, "version": "3"}


def test_infer_sends_file_unchanged(call: Call, client: ScriptedClient, png: str) -> None:
    """The content type follows from the file's name."""
    call("infer", "m", "--file", png)
    ((arguments, _),) = client.calls
    assert arguments == ("m", b"\x89PNG", "image/png")


def test_infer_uses_given_content_type(call: Call, client: ScriptedClient, png: str) -> None:
    """`--content-type` stands over the file's name."""
    call("infer", "m", "--file", png, "--content-type", "application/octet-stream")
    ((arguments, _),) = client.calls
    assert arguments[2] == "application/octet-stream"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give either --input, once or more, or --file"),
        (("--input", "x=[1]", "--content-type", "a/b"), "--content-type goes with --file"),
        (("--input", "x"), "expected NAME=JSON or NAME=@FILE.npy, got 'x'"),
        (("--input", "x=[1]", "--input", "x=[2]"), "x: expected each input once"),
        (("--input", "x=[1]", "--timeout", "0"), "0.0 is not in the range x>0"),
        (("--file", "nowhere.png"), "No such file or directory"),
        (
            ("--input", "x=[1]", "--output", "y.png"),
            "--output y.png: expected a name that ends in .npz or .json, since --input is answered "
            "with tensors, got one of image/png",
        ),
    ],
)
def test_wrong_infer_usage_exits_with_2(
    call: Call, client: ScriptedClient, arguments: tuple[str, ...], said: str
) -> None:
    """Wrong arguments end with exit code 2, before any request is sent."""
    result = call("infer", "m", *arguments)
    assert (result.exit_code, client.calls) == (Exit.USAGE, [])
    assert said in result.stderr


def test_answer_of_another_content_type_is_not_written(
    call: Call, client: ScriptedClient, png: str, tmp_path: Path
) -> None:
    """A service of an earlier release knows nothing of what is accepted."""
    result = call("infer", "m", "--file", png, "--output", "mask.png")

    assert client.calls[0][1]["accept"] == "image/png"
    assert result.exit_code == Exit.USAGE
    assert result.stderr.strip().endswith(
        "--output: mask.png: expected an answer in image/png, got tensors; name a .json file"
    )
    assert not (tmp_path / "mask.png").exists()


@pytest.mark.parametrize("element", [b"\xff", b"a\0"])
def test_bytes_that_npz_cannot_hold_leave_it_as_it_is(
    call: Call, client: ScriptedClient, tmp_path: Path, element: bytes
) -> None:
    """What cannot be written whole replaces nothing: NumPy drops zeros at the end of a text."""
    client.outcome = RESPONSE._replace(outputs={"y": np.array([element], object)})
    (tmp_path / "y.npz").write_bytes(b"former")
    result = call("infer", "m", "--input", "x=[1]", "--output", "y.npz")

    assert result.exit_code == Exit.USAGE
    assert "expected arrays that .npz can hold; name a .json file" in result.stderr
    assert (tmp_path / "y.npz").read_bytes() == b"former"


def test_image_is_written_as_it_is_and_shown_by_its_size(
    call: Call, client: ScriptedClient, png: str, tmp_path: Path
) -> None:
    """An image is written to the file as it is, also when its content type has parameters."""
    headers = [("content-type", b"image/jpeg; quality=90"), ("x-record-of", b"m/1")]
    record = np.array([b"\xff\xd8"], object)
    client.outcome = Response("m", "1", None, {"record": record}, {}, headers)
    shown = call("infer", "m", "--file", png)
    written = call("infer", "m", "--file", png, "--output", "drawn.jpg")

    assert shown.stdout.startswith("image/jpeg; quality=90, 2 bytes; --output FILE.jp")
    assert written.exit_code == Exit.DONE
    assert (tmp_path / "drawn.jpg").read_bytes() == b"\xff\xd8"


def test_infer_failure_is_one_line(call: Call, client: ScriptedClient) -> None:
    """A call that fails ends with exit code 1, its reason on stderr and nothing on stdout."""
    client.outcome = InferenceTimeout("no answer within 1 s")
    result = call("infer", "m", "--input", "x=[[1]]")
    assert (result.exit_code, result.stdout) == (Exit.FAILED, "")
    assert result.stderr == "headrace: no answer within 1 s\n"
