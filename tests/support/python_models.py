"""Models in Python that behave badly on certain values, and repositories of them."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEETING = threading.Barrier(2)
"""A barrier where runs wait for each other, or for a test; `meeting_of` replaces it for a time."""


@contextmanager
def meeting_of(parties: int) -> Iterator[threading.Barrier]:
    """Let runs wait at `MEETING` until so many, the test included, are there."""
    global MEETING  # noqa: PLW0603  # code of models reads it by its name
    former, MEETING = MEETING, threading.Barrier(parties)
    try:
        yield MEETING
    finally:
        MEETING.abort()
        MEETING = former


GATE = threading.Event()
"""The event for which the gated model waits, and so do runs that begin with `WAITS_AT_THE_GATE`."""

BEGUN = threading.Event()
"""Set by code of a model that has begun to wait for the gate."""

STEPS = threading.Semaphore(0)
"""Lets so many of them through while the gate is closed."""

WAITS_AT_THE_GATE = """
from tests.support.python_models import GATE, STEPS
while not (GATE.is_set() or STEPS.acquire(timeout=0.01)):
    if self.cancelled.is_set():
        raise RuntimeError("cancelled")
"""

HEAD = """
import threading
import time
import numpy as np
from headrace.errors import Retriable, Rejected, Code


class Model:
    inputs = [("x", "FP32", (-1, 1))]
    outputs = [("y", "FP32", (-1, 1))]
    calls = []
    cancelled = threading.Event()

    def warm_up(self):
        pass

    def cancel(self):
        self.cancelled.set()

    def run(self, inputs):
        x = inputs["x"]
        self.calls.append(x.ravel().tolist())
"""


ECHO = """
class Model:
    inputs = [("x", "BYTES", (-1, 2))]
    outputs = [("y", "BYTES", (-1, 2))]

    def run(self, inputs):
        return {"y": inputs["x"].copy()}
"""
"""A model that returns any bytes; ONNX Runtime takes UTF-8 alone."""


def with_hooks(*, imported: str = "", load: str = "pass", unload: str = "pass") -> str:
    """Return the code of a model that returns `x`, and runs statements, of one line each where it
    is loaded and unloaded, and any where it is imported.
    """
    return f"""
import os
import signal
import time
from pathlib import Path

HERE = Path(__file__).parent

{imported}


class Model:
    inputs = [("x", "FP32", (-1, 1))]
    outputs = [("y", "FP32", (-1, 1))]

    def load(self):
        {load}

    def unload(self):
        {unload}

    def run(self, inputs):
        return {{"y": inputs["x"]}}
"""


def add_python_model(
    repository: Path, run: str, *, name: str = "model", version: int = 1, config: str = ""
) -> None:
    """Add a model that doubles `x`, after the statements of `run`; unless `config` wants it to be
    asked, it is taken for batchable, since some of these never return.
    """
    directory = repository / name / str(version)
    directory.mkdir(parents=True)
    body = textwrap.indent(textwrap.dedent(run), " " * 8)
    (directory / "model.py").write_text(f"{HEAD}{body}\n        return {{'y': x * 2}}\n")
    if "probe" not in config:
        config += "\nprobe = false"
    (repository / name / "model.toml").write_text(f'backend = "python"\n{config}\n')


def add_whole_model(
    repository: Path, name: str, code: str, config: str = "", version: int = 1
) -> None:
    """Add a model whose whole `model.py` is given, and further lines of `model.toml`."""
    directory = repository / name / str(version)
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(code)
    (repository / name / "model.toml").write_text(f'backend = "python"\nprobe = false\n{config}\n')


@contextmanager
def shut_gate() -> Iterator[None]:
    """Shut the gate; open it at the end, whatever has happened, so that no thread stays behind."""
    GATE.clear()
    BEGUN.clear()
    try:
        yield
    finally:
        GATE.set()


def add_gated_model(repository: Path) -> None:
    """Add a model that doubles `x` as soon as `GATE` is set; its runs set `BEGUN` first."""
    run = "from tests.support.python_models import BEGUN, GATE\nBEGUN.set()\nGATE.wait()"
    add_python_model(repository, run, name="gated", config="max_batch_size = 1000")
