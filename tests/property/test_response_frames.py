"""A response put together from remembered pieces is what msgspec makes of the whole."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import encode_response, encode_responses
from headrace.protocol.messages import (
    BatchSummary,
    Envelope,
    InferenceResponse,
    OutputTensor,
    Request,
    Tensor,
)

IN_COMMON = ("model", "version", "ingested_us", "batch")
OF_BATCH = BatchSummary.__struct_fields__
SIZES = {"UINT8": 1, "FP32": 4, "INT64": 8}

slow_to_draw = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Generate tensors of any size, empty ones included, and `BYTES` of any length."""
    datatype = draw(st.sampled_from([*SIZES, "BYTES"]))
    shape = tuple(draw(st.lists(st.integers(0, 20), max_size=2)))
    size = SIZES.get(datatype, 0)
    for each in shape:
        size *= each
    size = draw(st.integers(0, 300)) if datatype == "BYTES" else size
    pattern = draw(st.binary(min_size=1, max_size=4))
    content = (pattern * size)[:size]
    return Tensor(draw(st.sampled_from(["a", "ä%b" * 20])), datatype, shape, content)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Generate requests with outputs and times, some from clocks that differ."""
    request = Request(NULL_ACK, 0, 1, 0, 0, None, b"", (), Envelope())
    request.model = draw(st.sampled_from(["m", "n" * 200]))
    request.version = draw(st.sampled_from(["1", "2"]))
    request.id = draw(st.sampled_from([None, "", "x" * 100]))
    request.outputs = tuple(draw(st.lists(tensors(), max_size=17)))
    request.ingested_us = draw(st.integers(0, 2**40))
    request.batch = draw(
        st.builds(BatchSummary, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 300))
    )
    return request


def whole(request: Request, now_us: int) -> bytes:
    """The value by the type of the contract."""
    assert request.outputs is not None
    batch = request.batch
    queue_us = batch.formed_us - request.ingested_us
    batch_us = now_us - batch.formed_us - batch.compute_us
    return msgspec.msgpack.encode(
        InferenceResponse(
            model_name=request.model,
            model_version=request.version,
            id=request.id,
            outputs=[
                OutputTensor(
                    name=each.name,
                    datatype=each.datatype,
                    shape=list(each.shape),
                    data=memoryview(each.data),
                )
                for each in request.outputs
            ],
            parameters={
                "queue_us": max(queue_us, 0),
                "batch_us": max(batch_us, 0),
                "compute_us": batch.compute_us,
                "batch_size": batch.rows,
            },
        )
    )


@slow_to_draw
@given(st.lists(requests(), min_size=1, max_size=5))
def test_response_pieces_make_whole_frame(several: list[Request]) -> None:
    """Answers encoded one after another make whole frames, also where buffers are reused."""
    for request in [*several, *several]:
        assert encode_response(request, 2**39) == whole(request, 2**39)


@st.composite
def runs(draw: st.DrawFn) -> list[Request]:
    """Requests that share their outputs' metadata, most of them all that a run has in common."""
    mates = [draw(requests())]
    for differs in draw(st.lists(st.sampled_from(["", "", *IN_COMMON[:3], *OF_BATCH]), max_size=3)):
        before = mates[-1]
        mate = Request(NULL_ACK, 0, 1, 0, 0, None, b"", (), Envelope())
        for name in IN_COMMON:
            setattr(mate, name, getattr(before, name))
        if differs in OF_BATCH:
            changed = {differs: getattr(before.batch, differs) + 1}
            mate.batch = msgspec.structs.replace(before.batch, **changed)
        elif differs:
            value = getattr(before, differs)
            setattr(mate, differs, value + ("+" if isinstance(value, str) else 1))
        mate.output_metadata = before.output_metadata
        mate.id = draw(st.sampled_from([None, None, "x"]))
        mate.output_data = tuple([bytes(each)[::-1] for each in before.output_data or ()])
        mates.append(mate)
    return mates


@slow_to_draw
@given(st.lists(runs(), min_size=1, max_size=3))
def test_answers_encoded_together_equal_answers_encoded_alone(several: list[list[Request]]) -> None:
    """Each value is that of its own request, for any neighbours."""
    together = [request for run in several for request in run]

    assert encode_responses(together, 2**39) == [whole(request, 2**39) for request in together]
