"""Trial loads: a version is opened and loaded in child processes first, which it may crash.

Both run native code and user code, and either may end its process. A version that does so in a
process that serves would end every process that is to serve it, and again after each restart. So in
each process that opens versions, a child imports their Python files first (`try_opening`); and in
an executor another child loads the version, probes it and compares its golden samples (`try_out`).
Each runs with the same code and settings, and ends. Its memory is free again before the same is
done in this process.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import threading
from contextlib import suppress
from typing import NamedTuple

import msgspec

from headrace.config import Settings
from headrace.errors import NotLoadableHere
from headrace.models.config import ModelConfig
from headrace.models.load_faults import restore_fault
from headrace.models.packing.signatures import Trust
from headrace.models.repository import FoundModel, FoundVersion, check_files
from headrace.models.version import ModelVersion
from headrace.primitives.bounded_cache import BoundedCache
from headrace.primitives.child_process import describe_exit, start_child
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.services.executor.trial_child import TrialReply, TrialTask
from headrace.tuning import TUNING, ExecutorTuning, ModelTuning

_MODULE = "headrace.services.executor.trial_child"
_decode_reply = msgspec.json.Decoder(TrialReply).decode


class TrialLoads:
    """Tries versions, one load at a time, so that at most one is in memory beside what serves.

    Args:
        settings: of the process.
        tuning: passed on to the child.
    """

    def __init__(self, settings: Settings, tuning: ExecutorTuning = TUNING.executor) -> None:
        self._settings = settings
        self._tuning = tuning
        self._turn = asyncio.Lock()
        # Unlike a version that fails in another way, one that ends its process may do harm to the
        # whole machine, such as by taking all memory. So no reload tries the same one again, unless
        # an operator has its files read again (`--again`): each such change allows one more trial,
        # because memory may have been short for another reason.
        self._refusals: BoundedCache[tuple[str, str], _Refusal] = BoundedCache(
            tuning.max_trial_refusals
        )

    def try_opening(self, model: FoundModel, found: FoundVersion, tuning: ModelTuning) -> None:
        """Open a version in a child process, if that runs code of the version. Blocks.

        The files are compared with the manifest before any of their code runs.

        Args:
            model: the model on disk, with its configuration.
            found: the version on disk.
            tuning: for the version.

        Raises:
            ConfigurationError: it could not be opened, ended its process, or took too long; see
                `try_out`.
        """
        config = model.config
        assert config is not None
        if not config.opens_with_code:
            return
        check_files(found, config)
        self._require_not_refused(model, found)
        child = self._make_child(model._replace(versions=()), found, tuning, loads=False)
        self._conclude(model, found, child.run())

    async def try_out(self, version: ModelVersion) -> None:
        """Load one instance of a version in a child process, and unload it.

        A version that ended its process, or took too long, is refused without another trial until
        its files or its configuration change, or an operator has its files read again.

        Raises:
            ConfigurationError: it could not be loaded, ended its process, or took too long.
        """
        model, found = version.source
        self._require_not_refused(model, found)
        async with self._turn:
            await run_on_daemon_thread(version.check_again)  # before any of their code runs
            child = self._make_child(model, found, version.tuning, loads=True)
            try:
                # The child is killed when the thread that started it ends: this one waits for it.
                reply = await run_on_daemon_thread(child.run)
            finally:
                child.kill()
        self._conclude(model, found, reply)

    def _make_child(
        self, model: FoundModel, found: FoundVersion, tuning: ModelTuning, *, loads: bool
    ) -> _TrialChild:
        assert model.config is not None
        task = TrialTask(
            model,
            found._replace(trust=Trust()),  # checked here, so that the child needs no keys
            tuning,
            self._tuning,
            self._settings.executor.cores,
            self._settings.schema_registry,
            loads,
        )
        limit_s = model.config.max_load_s + self._tuning.trial_start_s
        return _TrialChild(pickle.dumps(task), limit_s, self._tuning.trial_niceness)

    def _require_not_refused(self, model: FoundModel, found: FoundVersion) -> None:
        refusal = self._refusals.get((model.name, found.version))
        if refusal is not None and refusal.tried == _Tried(found.stamp, model.config, model.reads):
            raise NotLoadableHere(refusal.fault)

    def _conclude(self, model: FoundModel, found: FoundVersion, reply: TrialReply | str) -> None:
        """Raise `ConfigurationError` unless the reply says that the trial succeeded."""
        if isinstance(reply, str):
            tried = _Tried(found.stamp, model.config, model.reads)
            self._refusals.add((model.name, found.version), _Refusal(tried, reply))
            raise NotLoadableHere(reply)
        if not reply.succeeded:
            raise restore_fault(reply.fault, is_of_model=reply.is_of_model)


class _Tried(NamedTuple):
    """A version at its trial: the stamp of its files, its configuration, and `FoundModel.reads`."""

    stamp: str
    config: ModelConfig | None
    reads: int


class _Refusal(NamedTuple):
    """A version that ended its trial, or took too long, and why."""

    tried: _Tried
    fault: str


class _TrialChild:
    """A child that opens or loads a version.

    Args:
        task: pickled `TrialTask`.
        limit_s: time limit from its start to its end.
        niceness: see `headrace.primitives.child_process.start_child`.
    """

    def __init__(self, task: bytes, limit_s: float, niceness: int) -> None:
        self._task = task
        self._limit_s = limit_s
        self._niceness = niceness
        self._lock = threading.Lock()
        self._is_killed = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> TrialReply | str:
        """Run the child, and return its reply, or how it ended without one. Blocks."""
        with self._lock:
            if self._is_killed:
                return "trial load: cancelled"
            process = start_child(
                _MODULE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                niceness=self._niceness,
            )
            self._process = process
        with process:
            try:
                output, _ = process.communicate(self._task, timeout=self._limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return (
                    "trial load: expected the child process of the version to end within "
                    f"max_load_s and the time to start it, {self._limit_s:g} s, got no end"
                )
        return _read_reply(process.returncode, output)

    def kill(self) -> None:
        """Kill the child, if it has not ended; one that has not started never starts."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()  # without effect if it has ended already


def _read_reply(code: int, output: bytes) -> TrialReply | str:
    """Return what a child has replied, or else how it ended."""
    if code == 0:
        # Code of the version may have ended the child, even with code 0: it has not replied then.
        with suppress(msgspec.DecodeError):
            return _decode_reply(output)
    preposition = "by" if code < 0 else "with"
    return (
        "trial load: expected the child process of the version to reply, but it ended "
        f"{preposition} {describe_exit(code)}"
    )


def make_trials(settings: Settings, tuning: ExecutorTuning = TUNING.executor) -> TrialLoads | None:
    """Return what tries the versions of a process; None if the settings say that nothing does."""
    models = settings.models
    if models.mode == "all" or not models.trial_load:
        return None
    return TrialLoads(settings, tuning)
