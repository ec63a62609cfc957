"""Shared parts of the loops written by hand: their arguments, messages and model.

They contain what a careful author would write: typed MessagePack decoding without a copy of the
tensor, one session of ONNX Runtime with Headrace's options, rows stacked into one array.
They validate no requests, and know no deadlines, errors or duplicates.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import onnxruntime
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer


class RequestInput(msgspec.Struct):
    """One input of a request."""

    name: str
    datatype: str
    shape: list[int]
    data: memoryview


class RequestValue(msgspec.Struct):
    """A request record's value."""

    model_name: str
    inputs: list[RequestInput]


class ResponseOutput(msgspec.Struct):
    """One output of a response."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


class ResponseValue(msgspec.Struct):
    """A response record's value."""

    model_name: str
    outputs: list[ResponseOutput]


DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "uint8": "UINT8"}

decode = msgspec.msgpack.Decoder(RequestValue).decode
encode = msgspec.msgpack.Encoder().encode


@dataclass
class Arguments:
    """Command-line arguments of every contestant."""

    bootstrap_servers: str
    requests: str
    responses: str
    group: str
    model: str
    batch: int
    threads: int
    slow: bool


def connect(
    given: Arguments, max_batch_size: int = 16384
) -> tuple[AIOKafkaConsumer, AIOKafkaProducer]:
    """Return a consumer of requests and a producer of answers, neither of them started."""
    consumer = AIOKafkaConsumer(
        given.requests,
        bootstrap_servers=given.bootstrap_servers,
        group_id=given.group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    producer = AIOKafkaProducer(
        bootstrap_servers=given.bootstrap_servers,
        acks="all",
        enable_idempotence=True,
        max_batch_size=max_batch_size,
    )
    return consumer, producer


def arguments() -> Arguments:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--requests", required=True)
    parser.add_argument("--responses", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--model", required=True, help="the .onnx file")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="of a run; 0: one for each core")
    parser.add_argument("--slow", action="store_true", help="runs take milliseconds")
    return Arguments(**vars(parser.parse_args()))


class Model:
    """A session that turns request values into response values."""

    def __init__(self, path: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            path, sess_options=options, providers=["CPUExecutionProvider"]
        )
        self.names = [each.name for each in self._session.get_outputs()]
        (given,) = self._session.get_inputs()
        self.input_name = given.name
        self.dtype = np.dtype(
            {"tensor(float)": "f4", "tensor(int32)": "i4", "tensor(uint8)": "u1"}[given.type]
        )
        self.row_shape = tuple(given.shape[1:])

    def run(self, rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Run the model once; returns arrays in the order of the model's outputs."""
        found: list[np.ndarray[Any, Any]] = self._session.run(None, {self.input_name: rows})
        return found

    def answer(self, values: Sequence[bytes]) -> list[bytes]:
        """Answer requests of one row each with one run."""
        requests = [decode(value) for value in values]
        joined = b"".join([request.inputs[0].data for request in requests])
        rows = np.frombuffer(joined, self.dtype).reshape(len(requests), *self.row_shape)
        columns = [
            (name, DATATYPES[array.dtype.name], [1, *array.shape[1:]], array)
            for name, array in zip(self.names, self.run(rows), strict=True)
        ]
        return [
            encode(
                ResponseValue(
                    request.model_name,
                    [
                        ResponseOutput(name, datatype, shape, array[place].tobytes())
                        for name, datatype, shape, array in columns
                    ],
                )
            )
            for place, request in enumerate(requests)
        ]

    async def answer_soon(self, values: Sequence[bytes], slow: bool) -> list[bytes]:
        """Do the same as `answer`, on a thread if runs are slow, so that heartbeats are sent."""
        if slow:
            return await asyncio.to_thread(self.answer, values)
        return self.answer(values)


def start(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop, as Headrace does, until a signal."""
    import uvloop

    sys.setswitchinterval(0.0005)
    uvloop.run(main)
