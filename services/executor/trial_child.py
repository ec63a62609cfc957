"""Child process of a trial load, and what it exchanges with its parent.

    python -m headrace.services.executor.trial_child PARENT_PID

The parent writes a pickled `TrialTask` to stdin; the child writes a `TrialReply` in JSON to stdout
when it has opened the version, or unloaded it again. What code of the version prints goes to
stderr.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config import SchemaRegistrySettings
from headrace.errors import HeadraceError, describe_error
from headrace.models.cores import Cores
from headrace.models.load_faults import is_fault_of_model
from headrace.models.loader import BackendLoader
from headrace.models.repository import FoundModel, FoundVersion
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.version import ModelVersion
from headrace.primitives.child_process import end_with_parent
from headrace.services.executor.loading import make_instance
from headrace.tuning import ExecutorTuning, ModelTuning


class TrialTask(NamedTuple):
    """A version to open, as the parent has found it.

    Attributes:
        cores: `executor.cores` of the settings.
        schema_registry: has the schemas of framed records; nothing is requested from it.
        loads: load the version as well.
    """

    model: FoundModel
    found: FoundVersion
    models: ModelTuning
    executor: ExecutorTuning
    cores: str
    schema_registry: SchemaRegistrySettings | None
    loads: bool


class TrialReply(msgspec.Struct):
    """Outcome of a trial; `fault` says why the version could not be opened or loaded, and
    `is_of_model` what `headrace.models.load_faults.is_fault_of_model` says of that.
    """

    succeeded: bool
    fault: str = ""
    is_of_model: bool = False


async def _try(task: TrialTask) -> TrialReply:
    """Open the version, and load one instance as an executor does, and unload it."""
    registry = None if task.schema_registry is None else SchemaRegistry(task.schema_registry)
    try:
        version = ModelVersion(task.model, task.found, task.models, registry)
        if task.loads:
            loader = BackendLoader(version, Cores.of_process(task.cores))
            async with make_instance(version, 0, loader, task.executor):
                pass
    except HeadraceError as error:
        is_of_model = is_fault_of_model(error)
        return TrialReply(succeeded=False, fault=str(error), is_of_model=is_of_model)
    except Exception as error:  # noqa: BLE001 - a version may fail in any way
        return TrialReply(succeeded=False, fault=describe_error(error))
    return TrialReply(succeeded=True)


def _prefer_killing_this() -> None:
    """Let the kernel kill this process first when memory is short."""
    with suppress(OSError):  # not on this system, or not allowed
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main(arguments: list[str]) -> None:
    """Try the version on stdin, and reply on stdout."""
    [parent] = map(int, arguments)
    if not end_with_parent(parent):
        return
    stdout = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # From the parent alone, over a pipe that nothing else can open.
    task: TrialTask = pickle.load(sys.stdin.buffer)  # noqa: S301
    _prefer_killing_this()
    reply = asyncio.run(_try(task))
    with os.fdopen(stdout, "wb") as file:
        file.write(msgspec.json.encode(reply))
    # Threads of the version that hang, and its handlers at exit, must not keep it from ending.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
