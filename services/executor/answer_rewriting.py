"""Answers to payloads that are no tensors: the record with the outputs in it, JSON, or a PNG."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from numpy.typing import NDArray

from headrace.clock import Clock, wall_clock_us
from headrace.delivery.failures import REVOKED, deadline_passed, rejection
from headrace.errors import Code, Rejected, Retriable, describe_error
from headrace.models.answers import BoxAnswers, ClassAnswers, MaskAnswers
from headrace.models.inputs.framing import FramedSchemas
from headrace.models.inputs.records import Records
from headrace.models.version import ModelVersion
from headrace.primitives.backoff import Pauses
from headrace.protocol.codec import plain_value
from headrace.protocol.messages import (
    RECORD_ANSWER,
    Failure,
    Request,
    Tensor,
    TensorMetadata,
    whole_answer,
)
from headrace.protocol.tensors import to_array
from headrace.services.executor.postprocessing import Postprocessor
from headrace.telemetry.logs import Event
from headrace.topics import Stage
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)


async def rewrite_answers(
    requests: Sequence[Request],
    version: ModelVersion,
    postprocessor: Postprocessor | None,
    tuning: ExecutorTuning = TUNING.executor,
    clock: Clock = wall_clock_us,
) -> None:
    """Replace the outputs of requests that were payloads by what the version's model answers them,
    unless they accept tensors alone.

    A request whose answer cannot be written fails. If the version has a postprocess, that is run
    before.

    Raises:
        Fatal: see `Postprocessor.run`.
    """
    if postprocessor is not None:
        await postprocessor.run(requests, clock)
    chosen = [request for request in requests if _gets_whole_answer(request, version)]
    if not chosen:
        return
    if version.answers is not None:
        await _write_answers(chosen, version, version.answers, tuning)
    elif version.records is not None:
        await pass_through(chosen, version.records, tuning, clock)


def _gets_whole_answer(request: Request, version: ModelVersion) -> bool:
    """Return whether an ended request has outputs that are to be replaced."""
    if request.output_data is None or request.failure is not None:
        return False
    try:
        return bool(version.choose_whole_type(request.envelope))
    except Rejected as error:  # ingest has looked at another version
        _fail(request, rejection(error, Stage.EXECUTOR))
        return False


async def _write_answers(
    requests: Sequence[Request],
    version: ModelVersion,
    answers: ClassAnswers | BoxAnswers | MaskAnswers,
    tuning: ExecutorTuning,
) -> None:
    batched = version.signature.batched
    size_bytes = sum([len(data) for request in requests for data in request.output_data or ()])
    rows = sum([request.rows for request in requests])

    def write(request: Request, outputs: Mapping[str, NDArray[Any]]) -> bytes:
        if isinstance(answers, ClassAnswers):
            return answers.write(outputs, batched=batched)
        return answers.write(outputs, bytes(_plain(request)), request.envelope.content_type)

    is_quick = size_bytes <= tuning.inline_record_bytes and rows <= tuning.inline_answer_rows
    await _replace_outputs(
        requests,
        write,
        whole_answer(answers.content_type),
        step="answer",
        inline=is_quick and isinstance(answers, ClassAnswers),
    )


async def _replace_outputs(
    requests: Sequence[Request],
    write: Callable[[Request, Mapping[str, NDArray[Any]]], bytes],
    metadata: tuple[TensorMetadata, ...],
    *,
    step: str,
    inline: bool,
) -> None:
    """Replace the outputs of each request by one element, or fail it.

    Args:
        requests: ended, with outputs.
        write: returns the element, given a request and its outputs by name.
        metadata: of the element's tensor.
        step: named in the failure where something other than `Rejected` was raised.
        inline: write on the event loop, rather than on a thread.
    """

    def replace_all() -> None:
        for request in requests:
            try:
                outputs = {tensor.name: to_array(tensor) for tensor in request.outputs or ()}
                content = write(request, outputs)
            except Rejected as error:
                _fail(request, rejection(error, Stage.EXECUTOR))
            except Exception as error:  # noqa: BLE001 - one request must not end the batch of others
                text = f"{step}: {describe_error(error)}"
                _fail(request, Failure(Code.INTERNAL, text, Stage.EXECUTOR))
            else:
                element = struct.pack("<I", len(content)) + content
                request.outputs = (Tensor(*metadata[0], element),)

    if inline:
        replace_all()
    else:
        await asyncio.to_thread(replace_all)


async def pass_through(
    requests: Sequence[Request],
    records: Records,
    tuning: ExecutorTuning = TUNING.executor,
    clock: Clock = wall_clock_us,
) -> None:
    """Replace the outputs of requests, all records, by the records with the outputs in them.

    Many bytes are written on a thread, and so are records that came compressed, whose sizes are not
    known. A request whose record cannot be written fails. While the schema registry is unavailable,
    requests whose schemas this process does not know wait, at most until their deadlines.
    """
    if records.framed is not None:
        await _fetch_schemas(requests, records.framed, clock)
        requests = [request for request in requests if request.failure is None]
    size_bytes = sum([len(request.value or b"") for request in requests])
    is_compressed = any(
        request.envelope.content_encoding or records.expands(request.envelope.content_type)
        for request in requests
    )

    def merge(request: Request, outputs: Mapping[str, NDArray[Any]]) -> bytes:
        return records.merge(bytes(_plain(request)), request.envelope.content_type, outputs)

    await _replace_outputs(
        requests,
        merge,
        RECORD_ANSWER,
        step="pass_through",
        inline=size_bytes <= tuning.inline_record_bytes and not is_compressed,
    )


async def _fetch_schemas(requests: Sequence[Request], framed: FramedSchemas, clock: Clock) -> None:
    """Fetch the schemas of records that another process read, all of them together."""
    unknown: dict[int, list[Request]] = {}
    for request in requests:
        try:
            value = request.value or b""
            if request.envelope.content_encoding:
                value = bytes(await asyncio.to_thread(_plain, request))
            schema_id = framed.find_unknown(value)
        except Rejected as error:
            _fail(request, rejection(error, Stage.EXECUTOR))
        else:
            if schema_id is not None:
                unknown.setdefault(schema_id, []).append(request)
    async with asyncio.TaskGroup() as tasks:
        for schema_id, waiting in unknown.items():
            work = _fetch_for_all(waiting, framed, schema_id, clock)
            tasks.create_task(work, name=f"schema-{schema_id}")


async def _fetch_for_all(
    requests: Sequence[Request], framed: FramedSchemas, schema_id: int, clock: Clock
) -> None:
    """Fetch a schema while one of the requests waits for it; the first ones may end before."""
    for request in requests:
        try:
            await _fetch_schema(request, framed, schema_id, clock)
        except Rejected as error:
            _fail(request, rejection(error, Stage.EXECUTOR))


async def _fetch_schema(
    request: Request, framed: FramedSchemas, schema_id: int, clock: Clock
) -> None:
    pauses = Pauses(TUNING.schemas.backoff)
    deadline_ms = request.envelope.deadline_ms
    while True:
        left_s = max(0.0, deadline_ms / 1000 - clock() / 1e6) if deadline_ms else None
        try:
            # The run is not repeated for it: its outputs are here.
            async with asyncio.timeout(left_s):
                try:
                    await framed.fetch(schema_id)
                except Retriable as error:
                    log.warning(Event.SCHEMAS_DELAYED, model=request.model, reason=str(error))
                    await pauses.sleep()
                else:
                    return
        except TimeoutError:
            pass
        failure = REVOKED if request.ack_handle.revoked else None
        failure = failure or deadline_passed(request, clock(), Stage.EXECUTOR)
        if failure is not None:
            _fail(request, failure)
            return


def _plain(request: Request) -> bytes | memoryview:
    plain = plain_value(request.value, request.envelope, TUNING.protocol.max_decompressed_bytes)
    if plain is None:
        raise Rejected(Code.INTERNAL, "expected the payload of the request, got none")
    return plain


def _fail(request: Request, failure: Failure) -> None:
    request.outputs = None
    request.fail(failure)
