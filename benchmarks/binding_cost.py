"""CPU cost of a batch from its requests to their outputs (gather, run, scatter), with inputs and
outputs bound by address (`io_binding`), and without.

    python benchmarks/binding_cost.py [--rounds N]

Runs are made inline on one thread, whose CPU time is measured. Both ways alternate in rounds, so
that other load on the machine affects both. The run itself is included, and costs both the same.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median

import numpy as np

from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.config import ModelConfig
from headrace.models.signature import Signature, read_onnx_signature
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import Envelope, Request
from headrace.protocol.tensors import from_array
from headrace.services.executor.buffers import scatter
from headrace.services.executor.instance import HostBlockSize, Instance

ROWS = (1, 2, 8, 32)
BATCHES = 500


def _requests(count: int) -> list[Request]:
    requests = []
    for number in range(count):
        request = Request(NULL_ACK, 0, number, number - 1, 0, None, None, [], Envelope())
        pixels = np.full((1, 64), number, np.float32)
        request.inputs = (from_array("pixels", pixels),)
        request.shape_class, request.size_bytes = (), pixels.nbytes
        requests.append(request)
    return requests


async def _run(instance: Instance, signature: Signature, requests: Sequence[Request]) -> float:
    """Return the CPU microseconds per batch."""
    inputs = [request.inputs for request in requests]
    began_ns = time.thread_time_ns()
    for _ in range(BATCHES):
        for request, given in zip(requests, inputs, strict=True):
            request.inputs = given
        outputs = await instance.run(instance.gather(requests))
        scatter(requests, signature, outputs)
    spent_us = (time.thread_time_ns() - began_ns) / 1000 / BATCHES
    for request, given in zip(requests, inputs, strict=True):
        request.inputs = given
    return spent_us


def _instance(directory: Path, *, bound: bool) -> Instance:
    signature = read_onnx_signature(directory / "model.onnx")
    config = ModelConfig(io_binding=bound, intra_op_threads=1)
    return Instance(
        OnnxBackend(directory, config, signature),
        "bound" if bound else "plain",
        max_execution_s=10,
        max_load_s=60,
        may_inline=True,
        block_size=HostBlockSize(max(ROWS), config.max_batch_bytes) if bound else None,
    )


async def measure(directory: Path, rounds: int) -> None:
    """Measure all batch sizes, and print a table."""
    signature = read_onnx_signature(directory / "model.onnx")
    async with _instance(directory, bound=False) as plain, _instance(directory, bound=True) as tied:
        print("| rows | plain, µs | bound, µs | bound / plain |")
        print("|---:|---:|---:|---:|")
        for rows in ROWS:
            requests = _requests(rows)
            pairs = [
                (await _run(plain, signature, requests), await _run(tied, signature, requests))
                for _ in range(rounds + 1)
            ][1:]  # the first round warms up
            before, after = (median(column) for column in zip(*pairs, strict=True))
            ratio = median(after / before for before, after in pairs)
            print(f"| {rows} | {before:.1f} | {after:.1f} | {ratio:.2f} |")


def main() -> None:
    """Measure the demo's model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    with as_file(files("headrace.tools.demo") / "models" / "digits" / "1") as directory:
        asyncio.run(measure(directory, given.rounds))


if __name__ == "__main__":
    main()
