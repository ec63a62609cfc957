"""Output checks: fail requests with non-finite output rows, for models configured so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code
from headrace.models.backends.port import Arrays
from headrace.models.signature import Signature
from headrace.protocol.messages import Failure, Request
from headrace.protocol.tensors import to_array
from headrace.topics import Stage


def refuse_nonfinite(
    requests: Sequence[Request], signature: Signature, outputs: Arrays, max_listed_rows: int
) -> None:
    """Fail the requests that have NaN or infinity in their own rows; the error text lists up to
    `max_listed_rows` of them.
    """
    for spec in signature.outputs:
        if not spec.datatype.startswith(("FP", "BF")):
            continue
        array = outputs[spec.name]
        finite = np.isfinite(array)
        if finite.all():
            continue
        if signature.buckets:
            _refuse_padded(requests, spec.name, max_listed_rows)
            continue
        if not signature.batched:
            requests[0].outputs = None
            requests[0].fail(_failure(f"output {spec.name}: expected finite values, got others"))
            continue
        rows = np.asarray(finite.reshape(len(array), -1).all(axis=1))
        _refuse_rows(requests, spec.name, rows, max_listed_rows)


def _refuse_padded(requests: Sequence[Request], name: str, max_listed_rows: int) -> None:
    """Check the requests' own outputs, from which padding has been removed."""
    for request in requests:
        own = [to_array(one) for one in request.outputs or () if one.name == name]
        for array in own:
            finite = np.asarray(np.isfinite(array).reshape(len(array), -1).all(axis=1))
            _refuse_rows([request], name, finite, max_listed_rows)


def _refuse_rows(
    requests: Sequence[Request], name: str, finite: NDArray[np.bool_], max_listed_rows: int
) -> None:
    begin = 0
    for request in requests:
        bad = np.flatnonzero(~finite[begin : begin + request.rows])
        begin += request.rows
        if not bad.size or request.failure is not None:
            continue
        listed = ", ".join(map(str, bad[:max_listed_rows]))
        more = f" and {bad.size - max_listed_rows} more" if bad.size > max_listed_rows else ""
        request.outputs = None
        request.fail(
            _failure(
                f"output {name}: expected finite values, got NaN or infinities in "
                f"{bad.size} of {request.rows} rows: {listed}{more}"
            )
        )


def _failure(message: str) -> Failure:
    return Failure(Code.MODEL_FAILED, message, Stage.EXECUTOR)
