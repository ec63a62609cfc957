"""`headrace infer MODEL`: sends one request and prints its answer."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from headrace.cli.event_loop import run
from headrace.cli.infer_inputs import parse_inputs
from headrace.cli.options import POSITIVE
from headrace.cli.output import say
from headrace.cli.payloads import guess_content_type, make_inputs
from headrace.cli.settings import Invocation, pass_invocation
from headrace.client import Client, Response
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.protocol.codec import bytes_to_data
from headrace.protocol.headers import JSON, OCTETS
from headrace.protocol.negotiation import media_type
from headrace.protocol.tensors import datatype_of, from_array, to_array
from headrace.runtime.log_factory import open_log

SHOWN_ELEMENTS = 1000


class OutgoingRequest(NamedTuple):
    """A request to send: either `inputs`, or `payload` with its content type."""

    model: str
    version: str | None
    timeout_s: float
    inputs: dict[str, NDArray[Any]]
    payload: bytes | None = None
    content_type: str = ""
    accept: str = ""


@click.command()
@click.argument("model")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    callback=parse_inputs,
    metavar="NAME[:DATATYPE]=@FILE.npy|JSON",
    help="One input, such as pixels=@image.npy or pixels='[[0, 0.5]]'; repeat it for more.",
)
@click.option(
    "--file",
    type=click.File("rb"),
    help="A payload to send as it is, for the model's transform; - for stdin.",
)
@click.option(
    "--content-type", metavar="T", help="Content type of --file.  [default: by the file's name]"
)
@click.option(
    "--timeout",
    "timeout_s",
    type=POSITIVE,
    default=30.0,
    show_default=True,
    metavar="S",
    help="Seconds to wait for the answer; also the request's deadline.",
)
@click.option(
    "--explain",
    "explains",
    is_flag=True,
    help="Show the inputs that the model's transform makes of --file, and send nothing.",
)
@click.option("--version", metavar="V", help="Version of the model.  [default: its default]")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write the answer as JSON of the Open Inference Protocol.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the outputs there whole: arrays in FILE.npz, the answer in JSON in FILE.json, or "
    "the answer as it is if the model can give one of the file's content type, such as FILE.png.",
)
@pass_invocation
def command(
    invocation: Invocation,
    *,
    model: str,
    inputs: dict[str, NDArray[Any]],
    file: BinaryIO | None,
    content_type: str | None,
    timeout_s: float,
    version: str | None,
    as_json: bool,
    output: Path | None,
    explains: bool,
) -> None:
    """Send one request to MODEL and print the answer.

    With a broker in the settings, a running Headrace answers. Without one, the four services run in
    this process for this one request.

    Shapes include the batch dimension, as in [[1, 2, 3]] for one row. JSON with a fraction becomes
    FP32, without one INT64; NAME:DATATYPE says otherwise.

    With --explain the model is read from the repository in the settings; --json then writes the
    request that has these inputs.
    """
    if bool(inputs) == (file is not None):
        raise click.UsageError("give either --input, once or more, or --file")
    if content_type and file is None:
        raise click.UsageError("--content-type goes with --file")
    if explains and (file is None or output is not None):
        raise click.UsageError("--explain goes with --file, and not with --output")
    payload = b"" if file is None else file.read()
    accept = "" if output is None else _accepted_for(output, payload)
    if accept and file is None:
        raise click.UsageError(
            f"--output {output}: expected a name that ends in .npz or .json, since --input is "
            f"answered with tensors, got one of {accept}"
        )
    question = OutgoingRequest(model, version, timeout_s, inputs, accept=accept)
    if file is not None:
        question = question._replace(
            payload=payload, content_type=content_type or guess_content_type(file.name, payload)
        )
    if explains:
        say(_explain(invocation.settings, question, as_json=as_json))
        return
    response = run(_ask(invocation, question))
    if output is not None:
        write_output(output, response, accept)
        return
    say(json.dumps(as_protocol(response)) if as_json else as_text(response))


async def _ask(invocation: Invocation, question: OutgoingRequest) -> Response:
    open_client = invocation.open_client or _open_client
    async with open_client(invocation.settings) as client:
        if question.payload is None:
            return await client.infer(
                question.model,
                question.inputs,
                timeout_s=question.timeout_s,
                version=question.version,
            )
        return await client.infer_raw(
            question.model,
            question.payload,
            question.content_type,
            accept=question.accept,
            timeout_s=question.timeout_s,
            version=question.version,
        )


def _explain(settings: Settings, question: OutgoingRequest, *, as_json: bool) -> str:
    """Describe the inputs that a payload becomes; `as_json`: as a request of the protocol."""
    assert question.payload is not None
    version, inputs = run(
        make_inputs(
            settings, question.model, question.version, question.payload, question.content_type
        )
    )
    arrays = {tensor.name: to_array(tensor) for tensor in inputs}
    if not as_json:
        return as_lines(arrays)
    request = {
        "model_name": version.name,
        "model_version": version.version,
        "inputs": [_tensor(name, array) for name, array in arrays.items()],
    }
    return json.dumps(request)


@asynccontextmanager
async def _open_client(settings: Settings) -> AsyncIterator[Client]:
    if settings.kafka is not None:
        async with Client(settings=settings) as client:
            yield client
        return
    from headrace.runtime.process import Pipeline, running
    from headrace.telemetry.logs import configure_logging

    configure_logging("warning")
    async with (
        open_log(settings) as log,
        running(Pipeline(settings, log)),
        Client(log=log, settings=settings) as client,
    ):
        yield client


def _accepted_for(path: Path, payload: bytes) -> str:
    """Return the content type that a file's name asks for, in Avro that of the payload; empty for
    arrays and the protocol's JSON, which hold any answer, and for names that say nothing.
    """
    if path.suffix in ("", ".npz"):
        return ""
    content_type = guess_content_type(path.name, payload)
    return "" if content_type in (JSON, OCTETS) else content_type


def write_output(path: Path, response: Response, content_type: str) -> None:
    """Write all outputs: arrays by name as `numpy.savez` does, the answer itself if it has the
    content type, or the protocol's JSON.

    Raises:
        ConfigurationError: the file cannot be written, or the answer is none of the content type.
    """
    payload = response.payload
    # A service of an earlier release answers in the usual content type, whatever is accepted.
    if content_type and (payload is None or media_type(payload.content_type) != content_type):
        got = "tensors" if payload is None else payload.content_type
        raise ConfigurationError(
            f"--output: {path}: expected an answer in {content_type}, got {got}; name a .json file"
        )
    try:
        if path.suffix == ".npz":
            arrays = {name: _plain(array) for name, array in response.outputs.items()}
            np.savez(path, allow_pickle=False, **arrays)
        elif content_type and payload is not None:
            path.write_bytes(payload.content)
        else:
            path.write_text(json.dumps(as_protocol(response)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output: {path}: {error.strerror}") from error
    except (TypeError, ValueError) as error:  # bytes that are not text, or an output named `file`
        raise ConfigurationError(
            f"--output: {path}: expected arrays that .npz can hold; name a .json file ({error})"
        ) from error


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of objects, which .npy could only pickle, as one of text; others as they are.

    Raises:
        ValueError: the objects are bytes that are not text, or end with zeros, which NumPy drops.
    """
    if array.dtype != object:
        return array
    texts = [each.decode() if isinstance(each, bytes) else each for each in array.ravel()]
    plain = np.array(texts, np.str_)
    if plain.tolist() != texts:
        raise ValueError("expected texts that do not end with NUL")
    return plain.reshape(array.shape)


def as_text(response: Response) -> str:
    """Format the outputs, see `as_lines`; an answer without tensors stays as it is, if it is no
    image or sound.
    """
    payload = response.payload
    if payload is None:
        return as_lines(response.outputs)
    content, content_type = payload
    if content_type.startswith(("image/", "audio/", "video/")):
        suffix = mimetypes.guess_extension(media_type(content_type)) or ""
        return f"{content_type}, {len(content)} bytes; --output FILE{suffix} writes it to a file"
    return content.decode("utf-8", "replace").rstrip()


def as_lines(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Format each array on separate lines: name, datatype, shape and values."""
    return "\n".join(
        f"{name} {datatype_of(array.dtype).name} {list(array.shape)} "
        + np.array2string(array, threshold=SHOWN_ELEMENTS, separator=", ")
        for name, array in arrays.items()
    )


def as_protocol(response: Response) -> dict[str, Any]:
    """Return the answer in the JSON of the Open Inference Protocol."""
    return {
        "model_name": response.model_name,
        "model_version": response.model_version,
        **({"id": response.id} if response.id is not None else {}),
        "outputs": [_tensor(name, array) for name, array in response.outputs.items()],
        "parameters": response.parameters,
    }


def _tensor(name: str, array: NDArray[Any]) -> dict[str, Any]:
    tensor = from_array(name, array)
    elements, parameters = bytes_to_data(tensor)
    form = {
        "name": name,
        "datatype": tensor.datatype,
        "shape": list(tensor.shape),
        "data": elements,
    }
    return form | ({"parameters": dict(parameters)} if parameters else {})
