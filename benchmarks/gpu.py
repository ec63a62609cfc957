"""What a batch costs on a GPU, step by step: `python -m benchmarks.gpu`.

    python -m benchmarks.gpu [--device cuda:0] [--rows 64] [--rounds 3] [--repeats 30] [--soak-s 20]

It prints a table for each question of docs/device.md, "On a GPU": copies, what the host spends to
enqueue a run, the time of a batch by its rows, how much of the copies the ring hides, whether its
outputs are those of plain runs, what single options of the provider change, what full load does to
the free memory, and how many images a whole pipeline answers. The model is ResNet-50 with random
weights, on images of 224 x 224 bytes, in FP32 (which ONNX Runtime computes as TF32) and in FP16.
`--device cpu` runs the same code without a GPU, to try it.

Times are medians of the host's clock, from the call until the device has finished, unless a column
says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import onnx
import uvloop
from numpy.typing import NDArray

from benchmarks.embedded_load import (
    PARTITIONS,
    count_records,
    running_pipeline,
    wait_for_answers,
)
from benchmarks.models import IMAGE, write_resnet50
from headrace.config import Settings, make_settings
from headrace.device.port import Block, Device
from headrace.log.port import NewRecord, TopicPartition
from headrace.models.backends.onnx_runtime import OnnxBackend, bind_device_memory
from headrace.models.backends.onnx_session import SessionStream, open_session, run_options
from headrace.models.config import ModelConfig, make_model_config
from headrace.models.signature import read_onnx_signature
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import encode_request
from headrace.protocol.messages import Envelope, Request
from headrace.protocol.tensors import from_array
from headrace.services.executor.device.instance import (
    GRAPH_RUNS,
    BoundRing,
    DeviceInstance,
    DevicePlacement,
    RingBatch,
)
from headrace.services.executor.device.ring import Ring, buckets, plan_ring
from headrace.services.executor.loading import open_device
from headrace.telemetry.logs import configure_logging
from headrace.topics import Topic
from headrace.tuning import TUNING

KIB = 1024
COPY_BYTES = (4 * KIB, 64 * KIB, 588 * KIB, 4704 * KIB, 64 * KIB * KIB)
WAYS = {
    "plain": {"ring": False, "cuda_graphs": False},
    "ring": {"ring": True, "cuda_graphs": False},
    "ring and graphs": {"ring": True, "cuda_graphs": True},
}
OPTIONS: Mapping[str, Mapping[str, int | str]] = {
    "as configured": {},
    "prefer_nhwc = 1": {"prefer_nhwc": 1},
    "fuse_conv_bias = 1": {"fuse_conv_bias": 1},
    "cudnn_conv_use_max_workspace = 0": {"cudnn_conv_use_max_workspace": 0},
    "cudnn_conv_algo_search = EXHAUSTIVE": {"cudnn_conv_algo_search": "EXHAUSTIVE"},
    "cudnn_conv_algo_search = DEFAULT": {"cudnn_conv_algo_search": "DEFAULT"},
    "use_tf32 = 0": {"use_tf32": 0},
}
PIPELINE_REQUESTS = 6000
DISTINCT = 64


class Subject(NamedTuple):
    """A model in a repository of its own, the device, the largest batch, and the repetitions of
    which a time is the median.
    """

    name: str
    repository: Path
    device: str
    rows: int
    repeats: int

    @property
    def directory(self) -> Path:
        """Directory of its version."""
        return self.repository / "resnet50" / "1"

    def settings(self, **executor: Any) -> Settings:
        """Return settings of a pipeline that serves it."""
        if self.device != "cpu":
            executor |= {"device": self.device, "experimental_cuda": True}
        return make_settings(
            {
                "models": {"repository": str(self.repository)},
                "executor": executor,
                "batching": {"max_batch_size": self.rows, "max_batch_bytes": 2**25},
            }
        )

    def config(self, **values: Any) -> ModelConfig:
        """Return the configuration of the model."""
        values = {"max_batch_size": self.rows, "device": self.device, **values}
        if self.device != "cpu":
            values["experimental_cuda"] = True
        return make_model_config(values, make_settings({}))


class OpenRing(NamedTuple):
    """A ring on this thread, with the parts that the instance keeps to itself."""

    device: Device
    ring: Ring
    bound: BoundRing
    backend: OnnxBackend
    repeats: int


def _write_models(scratch: Path, device: str, rows: int, repeats: int) -> list[Subject]:
    subjects = [Subject(name, scratch / name, device, rows, repeats) for name in ("FP32", "FP16")]
    for subject in subjects:
        subject.directory.mkdir(parents=True)
    write_resnet50(subjects[0].directory / "model.onnx")
    if device == "cpu":
        return subjects[:1]
    # ONNX Runtime's own converter; inputs and outputs keep their datatypes.
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(subjects[0].directory / "model.onnx")
    half = convert_float_to_float16(model, keep_io_types=True)
    onnx.save(half, subjects[1].directory / "model.onnx")
    return subjects


@contextmanager
def _open(
    subject: Subject, *, graphs: bool, options: Mapping[str, Any] | None = None
) -> Iterator[OpenRing]:
    """Yield the ring of a model, with every bucket bound, on this thread."""
    values: dict[str, Any] = {"ring": True}
    if options:
        values["provider_options"] = {"CUDAExecutionProvider": dict(options)}
    config = subject.config(**values)
    signature = read_onnx_signature(subject.directory / "model.onnx")
    backend = OnnxBackend(subject.directory, config, signature)
    device = open_device(subject.device)
    plan = plan_ring(backend.processing, subject.rows, TUNING.executor.ring_slots)
    assert plan is not None
    ring = Ring(device, plan)
    backend.use_stream(ring.compute.address, graphs=graphs)
    backend.load()
    bound = BoundRing(subject.name, ring, plan, backend, TUNING.executor)
    bound.bind(GRAPH_RUNS if graphs else 1)
    try:
        yield OpenRing(device, ring, bound, backend, subject.repeats)
    finally:
        backend.unload()


def _pixels(rows: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (rows, 3, IMAGE, IMAGE), np.uint8)


def _requests(rows: int, seed: int = 0) -> list[Request]:
    pixels = _pixels(rows, seed)
    requests = []
    for number in range(rows):
        request = Request(NULL_ACK, 0, number, number - 1, 0, None, None, [], Envelope())
        request.inputs = (from_array("image", pixels[number : number + 1]),)
        request.shape_class, request.size_bytes = (), pixels[number].nbytes
        requests.append(request)
    return requests


def _median_us(work: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        began_ns = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - began_ns) / 1000)
    return median(times)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(f"\n### {title}\n\n| {' | '.join(columns)} |")
    print(f"|{'---|' + '---:|' * (len(columns) - 1)}")
    for row in rows:
        cells = [f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in row]
        print(f"| {' | '.join(cells)} |", flush=True)


# --- copies --------------------------------------------------------------------------------------


def _copy_us(
    device: Device, ways: Sequence[tuple[Block, Block]], size_bytes: int, repeats: int
) -> float:
    """Return the time of copies that begin together, each on its own stream."""
    streams = [device.stream(f"way {number}") for number in range(len(ways))]
    events = [device.event(f"end {number}") for number in range(len(ways))]

    def copy() -> None:
        for (source, target), stream, event in zip(ways, streams, events, strict=True):
            device.copy(source, target, size_bytes, stream)
            device.record(event, stream)
        for event in events:
            device.synchronize(event)

    return _median_us(copy, repeats)


def measure_copies(device: Device, repeats: int) -> None:
    """Print the time of copies from pinned and from ordinary memory, in and out, and both."""
    rows: list[list[object]] = []
    for size_bytes in COPY_BYTES:
        host, back = (device.host_block(name, size_bytes) for name in ("host", "back"))
        there, other = (device.device_block(name, size_bytes) for name in ("there", "other"))
        pageable = np.ones(size_bytes, np.uint8)
        plain = Block("pageable", size_bytes, pageable.ctypes.data, pageable, pageable)
        times_us = [
            _copy_us(device, ways, size_bytes, repeats)
            for ways in (
                [(host, there)],
                [(plain, there)],
                [(there, back)],
                [(host, there), (other, back)],
            )
        ]
        rate = size_bytes / times_us[0] / 1000
        rows.append([f"{size_bytes / KIB:,.0f} KiB", *times_us, rate])
    columns = ["size", "in, µs", "in from ordinary memory, µs", "out, µs", "in and out, µs"]
    _print_table("Copies from and to pinned memory", [*columns, "in, GB/s"], rows)


# --- runs ----------------------------------------------------------------------------------------


def measure_calls(subject: Subject) -> None:
    """Print what a call of ONNX Runtime takes of the host, by its options."""
    device, config = open_device(subject.device), subject.config()
    stream = device.stream("compute")
    signature = read_onnx_signature(subject.directory / "model.onnx")
    path = subject.directory / "model.onnx"
    session = open_session(path, config, None, SessionStream(stream.address, True))
    rows: list[list[object]] = []
    for number, count in enumerate((1, 8, 64), start=1):
        image = device.device_block("image", count * 3 * IMAGE * IMAGE)
        result = device.device_block("result", count * 1000 * 4)
        places = {"image": image.address}, {"probabilities": result.address}
        binding = bind_device_memory(session, signature, subject.device, count, places)
        event = device.event("end")
        times_us: list[object] = []
        kinds = {
            "waits": run_options(-1),
            "does not wait": run_options(-1, wait=False),
            "graph": run_options(number, wait=False),
        }
        for options in kinds.values():

            def call(options: Any = options, binding: Any = binding) -> None:
                session.run_with_iobinding(binding, options)

            def finish(event: Any = event) -> None:
                device.record(event, stream)
                device.synchronize(event)

            host_us, whole_us = _host_and_whole_us(call, finish, subject.repeats)
            times_us += [host_us, whole_us]
        rows.append([count, *times_us])
    columns = [f"{kind}: {what}, µs" for kind in kinds for what in ("call", "whole")]
    _print_table(f"A run of ONNX Runtime, {subject.name}", ["rows", *columns], rows)


def _host_and_whole_us(
    call: Callable[[], object], finish: Callable[[], object], repeats: int
) -> tuple[float, float]:
    for _ in range(GRAPH_RUNS + 1):
        call()
        finish()
    host_us, whole_us = [], []
    for _ in range(repeats):
        began_ns = time.perf_counter_ns()
        call()
        host_us.append((time.perf_counter_ns() - began_ns) / 1000)
        finish()
        whole_us.append((time.perf_counter_ns() - began_ns) / 1000)
    return median(host_us), median(whole_us)


def measure_batches(subject: Subject) -> None:
    """Print the time of a batch in the ring by its rows, alone and behind another one."""
    rows: list[list[object]] = []
    counts = [
        count for count in (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64) if count <= subject.rows
    ]
    columns = ["rows"]
    times: dict[int, list[object]] = {count: [] for count in counts}
    for name in ("ring", "ring and graphs") if subject.device != "cpu" else ("ring",):
        with _open(subject, graphs=WAYS[name]["cuda_graphs"]) as opened:
            for count in counts:
                times[count] += _time_batch(opened, count)
        columns += [f"{name}: {what}, µs" for what in ("submit", "alone", "compute", "cycle")]
    rows = [[count, *times[count]] for count in counts]
    _print_table(f"A batch in the ring, {subject.name}", columns, rows)


def _time_batch(opened: OpenRing, rows: int) -> list[float]:
    """Return the time to enqueue a batch, from there to its answers, of the run without copies,
    and from answers to answers with the next batch always enqueued.
    """
    bound, requests = opened.bound, _requests(rows)
    first, second = (bound.gather(requests, rows) for _ in range(2))
    submit_us, alone_us = _host_and_whole_us(
        lambda: bound.submit(first), lambda: bound.wait(first), opened.repeats
    )
    run, event = _bare_run(opened, rows), opened.device.event("end")

    def compute() -> None:
        for _ in range(opened.repeats):
            run()
        opened.device.record(event, opened.ring.compute)
        opened.device.synchronize(event)

    compute_us = _median_us(compute, 3) / opened.repeats
    cycle_us = _cycle_us(bound, first, second, opened.repeats)
    bound.release(first)
    bound.release(second)
    return [submit_us, alone_us, compute_us, cycle_us]


def _bare_run(opened: OpenRing, rows: int) -> Callable[[], None]:
    """Return the model's run alone, from and to the ring's own inputs and outputs."""
    ring = opened.ring
    inputs = {name: block.address for name, block in ring.inputs.items()}
    outputs = {name: block.address for name, block in ring.outputs.items()}
    enqueue = opened.backend.bind(rows, 1000 + rows, inputs, outputs)
    for _ in range(GRAPH_RUNS):
        opened.device.launch(enqueue, ring.compute, reads=(), writes=())
    return enqueue


def _cycle_us(bound: BoundRing, first: RingBatch, second: RingBatch, repeats: int) -> float:
    bound.submit(first)
    bound.submit(second)
    times, turns = [], (first, second) * repeats
    began_ns = time.perf_counter_ns()
    for batch in turns:
        bound.wait(batch)
        now_ns = time.perf_counter_ns()
        times.append((now_ns - began_ns) / 1000)
        began_ns = now_ns
        bound.submit(batch)
    bound.wait(first)
    bound.wait(second)
    return median(times)


def check_replays(subject: Subject) -> None:
    """Print how far the ring's outputs are from those of plain runs, for every number of rows, and
    what a run from a second thread does, for which ONNX Runtime has captured no graph.
    """
    graphs = subject.device != "cpu"
    rows: list[list[object]] = []
    with _open(subject, graphs=graphs) as opened:
        sizes = buckets(subject.rows, TUNING.executor)
        for count in range(1, subject.rows + 1):
            requests = _requests(count, count)
            given = _pixels(count, count)
            padding = next(size for size in sizes if size >= count) - count
            padded = np.concatenate([given, *[given[-1:]] * padding])
            wanted = opened.backend.run({"image": padded})["probabilities"][:count]
            rows.append([count, float(np.abs(_outputs(opened, requests) - wanted).max())])
        requests = _requests(1)
        wanted, found = _outputs(opened, requests), []
        thread = threading.Thread(target=lambda: found.append(_outputs(opened, requests)))
        thread.start()
        thread.join()
        rows.append(["1, second thread", float(np.abs(found[0] - wanted).max())])
    worst = max(rows, key=lambda row: row[1])  # type: ignore[arg-type,return-value]
    title = f"Outputs of the ring against plain runs, {subject.name}, largest difference"
    _print_table(title, ["rows", "difference"], [worst, rows[-1]])


def _outputs(opened: OpenRing, requests: Sequence[Request]) -> NDArray[Any]:
    bound = opened.bound
    batch = bound.gather(requests, len(requests))
    bound.submit(batch)
    bound.wait(batch)
    outputs = bound.outputs(batch)["probabilities"]
    bound.release(batch)
    return outputs


def soak(subject: Subject, seconds: float) -> None:
    """Print rows per second under full load for a while, and the free memory before and after."""
    requests = [_requests(subject.rows, seed) for seed in range(2)]
    with _open(subject, graphs=subject.device != "cpu") as opened:
        bound, count = opened.bound, 0
        free_bytes = opened.device.memory().free_bytes
        ahead = bound.gather(requests[0], subject.rows)
        bound.submit(ahead)
        began_s = time.perf_counter()
        while (spent_s := time.perf_counter() - began_s) < seconds:
            current, count = ahead, count + 1
            ahead = bound.gather(requests[count % 2], subject.rows)
            bound.submit(ahead)
            bound.wait(current)
            bound.outputs(current)
            bound.release(current)
        bound.wait(ahead)
        left_bytes = opened.device.memory().free_bytes
    row = [seconds, count * subject.rows / spent_s, f"{free_bytes:,}", f"{left_bytes:,}"]
    _print_table(
        f"Full load, {subject.name}", ["seconds", "rows/s", "free bytes before", "after"], [row]
    )


def measure_options(subject: Subject) -> None:
    """Print what single options of the provider change, with graphs."""
    rows: list[list[object]] = []
    for name, options in OPTIONS.items():
        try:
            with _open(subject, graphs=True, options=options) as opened:
                one, many = _time_batch(opened, 1), _time_batch(opened, subject.rows)
        except Exception as error:  # noqa: BLE001 - the row says so, and the others go on
            rows.append([name, f"{type(error).__name__}: {error}"[:200], "", ""])
            continue
        rows.append([name, one[2], many[2], subject.rows / many[2] * 1e6])
    columns = ["option", "1 row, µs", f"{subject.rows} rows, µs", "rows/s"]
    _print_table(f"Options of the provider, the run alone, {subject.name}", columns, rows)


# --- instances and pipelines ---------------------------------------------------------------------


async def measure_instances(subject: Subject, rounds: int) -> None:
    """Print rows per second of an instance that gathers, runs and takes the answers."""
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    requests = [_requests(subject.rows, seed) for seed in range(2)]
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            if subject.device == "cpu" and way["cuda_graphs"]:
                continue
            rate = await _instance_rate(subject, way, requests)
            if number:
                rates[name].append(rate)
    rows = [[name, median(found), min(found), max(found)] for name, found in rates.items() if found]
    title = f"An instance with batches of {subject.rows}, {subject.name}, rows/s"
    _print_table(title, ["way", "median", "lowest", "highest"], rows)


async def _instance_rate(
    subject: Subject, way: Mapping[str, bool], requests: Sequence[Sequence[Request]]
) -> float:
    config = subject.config(**way)
    signature = read_onnx_signature(subject.directory / "model.onnx")
    placement = DevicePlacement(
        lambda: open_device(subject.device), subject.rows, way["ring"], way["cuda_graphs"], {}
    )
    backend = OnnxBackend(subject.directory, config, signature)
    batches = 60 if subject.device != "cpu" else 4
    async with DeviceInstance(
        backend, "instance", placement, max_execution_s=60, max_load_s=600
    ) as instance:
        ahead = instance.gather(requests[0])
        began_s = time.perf_counter()
        for number in range(batches):
            call = instance.submit(ahead)
            ahead = instance.gather(requests[(number + 1) % 2])
            instance.submit_next(ahead, lambda: True)
            await instance.wait(call)
        spent_s = time.perf_counter() - began_s
        await instance.run(ahead)
    return batches * subject.rows / spent_s


async def measure_pipelines(subject: Subject, rounds: int) -> None:
    """Print answers per second of a whole pipeline on the embedded log under a backlog."""
    pixels = _pixels(DISTINCT, 1)
    values = [
        encode_request("application/msgpack", "resnet50", {"image": image[np.newaxis]})
        for image in pixels
    ]
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    count = PIPELINE_REQUESTS if subject.device != "cpu" else 32
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            if subject.device == "cpu" and way["cuda_graphs"]:
                continue
            rate = await _pipeline_rate(subject.settings(**way), values, count)
            print(f"{subject.name}, {name}: {rate:,.0f}/s", file=sys.stderr, flush=True)
            if number:
                rates[name].append(rate)
    rows = [[name, median(found), min(found), max(found)] for name, found in rates.items() if found]
    title = f"A whole pipeline on the embedded log, {subject.name}, answers/s"
    _print_table(title, ["way", "median", "lowest", "highest"], rows)


async def _pipeline_rate(settings: Settings, values: Sequence[bytes], count: int) -> float:
    topic = settings.topic(Topic.REQUESTS)
    async with running_pipeline(settings) as log, log.producer() as producer:
        began_s = time.perf_counter()
        for number in range(count):
            target = TopicPartition(topic, number % PARTITIONS)
            record = NewRecord(None, values[number % len(values)], (), int(time.time() * 1000))
            await producer.send(target, [record])
        await wait_for_answers(log, settings, count)
        spent_s = time.perf_counter() - began_s
        assert await count_records(log, settings, Topic.DEAD_LETTERS) == 0
    return count / spent_s


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--soak-s", type=float, default=20.0)
    parser.add_argument("--models", default="FP32,FP16")
    parser.add_argument(
        "--parts", default="copies,calls,batches,replays,options,soak,instances,pipelines"
    )
    given = parser.parse_args()
    configure_logging("warning")
    parts = given.parts.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        if "copies" in parts:
            measure_copies(open_device(given.device), given.repeats)
        for subject in _write_models(Path(scratch), given.device, given.rows, given.repeats):
            if subject.name not in given.models:
                continue
            for part in parts:
                _measure(part, subject, given)


def _measure(part: str, subject: Subject, given: argparse.Namespace) -> None:
    match part:
        case "calls":
            measure_calls(subject)
        case "batches":
            measure_batches(subject)
        case "replays":
            check_replays(subject)
        case "soak":
            soak(subject, given.soak_s)
        case "options":
            measure_options(subject)
        case "instances":
            asyncio.run(measure_instances(subject, given.rounds))
        case "pipelines":
            uvloop.run(measure_pipelines(subject, given.rounds))


if __name__ == "__main__":
    main()
