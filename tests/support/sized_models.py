"""Models in Python that take a known amount of memory, and a budget for some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.client import Client
from headrace.config import Settings, make_settings
from headrace.runtime.process import Pipeline
from tests.support.pipelines import PARTITIONS
from tests.support.python_models import add_whole_model

MIB = 2**20
MODEL_BYTES = 96 * MIB
LIMIT_BYTES = 240 * MIB
"""Room for two of the models."""

CODE = """
import numpy as np

class Model:
    inputs = [("x", "FP32", (-1, 1))]
    outputs = [("y", "FP32", (-1, 1))]

    def load(self):
        {load}
        self.weights = np.ones({taken}, np.uint8)

    def run(self, inputs):
        {run}
        return {{"y": inputs["x"] * {factor}}}
"""


def add_model(
    repository: Path,
    name: str,
    config: str = "",
    *,
    taken: int = MODEL_BYTES,
    on_disk: int | None = None,
    load: str = "pass",
    run: str = "pass",
    version: int = 1,
    factor: int = 2,
) -> None:
    """Add a version of a model that multiplies its input and takes so many bytes of memory.

    Args:
        repository: of models.
        name: of the model.
        config: further lines of `model.toml`.
        taken: bytes of memory.
        on_disk: size of a file of the version, by default as much: the measured growth of a
            process of many tests can be smaller, and the budget counts the larger of both.
        load: a statement that is executed before it loads.
        run: a statement that is executed before it runs.
        version: its number.
        factor: what the input is multiplied by.
    """
    code = CODE.format(taken=taken, load=load, run=run, factor=factor)
    add_whole_model(repository, name, code, config, version=version)
    with (repository / name / str(version) / "weights.bin").open("wb") as weights:
        weights.truncate(taken if on_disk is None else on_disk)


def settings_with_budget(repository: Path, **models: Any) -> Settings:
    """Settings with memory for two of the models."""
    models = {"repository": repository, "memory_bytes": LIMIT_BYTES} | models
    return make_settings({"topics": {"partitions": PARTITIONS}, "models": models})


async def answers(client: Client, name: str, timeout_s: float = 60) -> bool:
    """Whether a model answers, and rightly."""
    response = await client.infer(name, {"x": np.array([[21]], np.float32)}, timeout_s=timeout_s)
    return bool(response.outputs["y"] == 42)


def states(pipeline: Pipeline) -> dict[str, tuple[str, str]]:
    """State and reason of each version."""
    return {
        f"{entry['name']}/{entry['version']}": (entry["state"], entry["reason"])
        for entry in pipeline.models.catalog.status()
    }


def held_bytes(pipeline: Pipeline) -> int:
    """Return the bytes of the budget that loaded versions hold, as `/status` shows them."""
    budget: dict[str, int] = pipeline.state.status()["model_memory"]
    assert budget["limit_bytes"] == LIMIT_BYTES
    return budget["held_bytes"]
