"""The executor's path: a batch is pulled → gathered → run → its outputs are shared out again.

Every ready version of a model has one task for each of its instances. When a run fails, the batch
is halved, and the halves wait while fresh batches pass in turn, until the culprit stands alone:
only that request fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from headrace.clock import Clock
from headrace.errors import Code, ConfigurationError, Fatal, Rejected, Retriable
from headrace.flow.channel import Outlet, PullChannel, Puller
from headrace.flow.endings import VOID, deadline_passed, rejection
from headrace.messages import Batch, Failure, Request
from headrace.models.backend import Arrays
from headrace.models.registry import Change, Models
from headrace.models.version import ModelVersion, State
from headrace.services.executor.gather import gather, scatter
from headrace.services.executor.instance import Instance
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage

log = structlog.get_logger(__name__)

ModelKey = tuple[str, str]
RUN_ATTEMPTS = 3


class ExecutorService:
    """Loads the models and runs what they are asked.

    Args:
        pulls: where batches come from.
        answers: takes requests with their outputs or failures.

    Attributes:
        loaded: set when every version that was there at the start has loaded or failed.
    """

    def __init__(
        self,
        pulls: PullChannel[ModelKey, Batch],
        answers: Outlet[list[Request]],
        models: Models,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._pulls = pulls
        self._answers = answers
        self._models = models
        self._metrics = metrics
        self._clock = clock
        self._loading: set[ModelVersion] = set()
        self.loaded = asyncio.Event()

    async def run(self) -> None:
        """Until the batches end. Versions that come or go meanwhile are taken up or let go."""
        changes: asyncio.Queue[Change] = asyncio.Queue()
        self._models.subscribe(changes.put_nowait)
        self._loading.update(self._models.versions(State.LOADING))
        for version in self._loading:
            changes.put_nowait(Change("load", version))
        self._settled(None)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow(changes, tasks), name="executor-models")
            await self._pulls.ended()
            following.cancel()
        self._answers.close()

    async def _follow(self, changes: asyncio.Queue[Change], tasks: asyncio.TaskGroup) -> None:
        """Serve what is to be served."""
        serving: dict[ModelVersion, list[Puller[ModelKey, Batch]]] = {}
        while True:
            change = await changes.get()
            version = change.version
            if change.action == "load":
                key = (version.name, version.version)
                pullers = [self._pulls.puller(key) for _ in range(version.config.instances)]
                serving[version] = pullers
                tasks.create_task(self._serve(version, pullers), name=f"serve {version!r}")
            else:
                for puller in serving.pop(version, ()):
                    puller.release()

    async def _serve(self, version: ModelVersion, pullers: list[Puller[ModelKey, Batch]]) -> None:
        """Load a version, run its instances, and unload it."""
        name = f"{version.name}-{version.version}"
        try:
            async with AsyncExitStack() as stack:
                backends = [version.new_backend() for _ in pullers]
                instances = [
                    await stack.enter_async_context(
                        Instance(
                            backend,
                            f"{name}-{number}",
                            max_execution_s=version.config.max_execution_s,
                            may_inline=version.may_inline,
                        )
                    )
                    for number, backend in enumerate(backends)
                ]
                fault = next((one.batching_fault for one in backends if one.batching_fault), "")
                self._models.mark_ready(version, batching_fault=fault)
                log.info("model_ready", model=version.name, version=version.version)
                self._settled(version)
                async with asyncio.TaskGroup() as tasks:
                    for instance, puller in zip(instances, pullers, strict=True):
                        tasks.create_task(self._pull_and_run(version, instance, puller), name=name)
        except ConfigurationError as error:
            log.error(
                "model_failed", model=version.name, version=version.version, reason=str(error)
            )
            self._models.mark_failed(version, str(error))
            self._settled(version)

    def _settled(self, version: ModelVersion | None) -> None:
        """A version has loaded or failed; when all have that were there first, say so."""
        self._loading.discard(version)
        if not self._loading:
            self.loaded.set()

    async def _pull_and_run(
        self, version: ModelVersion, instance: Instance, puller: Puller[ModelKey, Batch]
    ) -> None:
        """One instance's loop. Parts of failed batches and fresh batches take turns."""
        suspects: deque[list[Request]] = deque()
        fresh_turn = False
        while True:
            if suspects:
                batch = puller.take() if fresh_turn else None
                fresh_turn = not fresh_turn
                requests = batch.requests if batch is not None else suspects.popleft()
            else:
                batch = await puller.pull()
                if batch is None:
                    return
                requests = batch.requests
            finished, halves = await self._run(version, instance, requests)
            suspects.extend(halves)
            if finished:
                await self._answers.send(finished)

    async def _run(
        self, version: ModelVersion, instance: Instance, requests: list[Request]
    ) -> tuple[list[Request], list[list[Request]]]:
        """Run requests together; returns those that are done, and what is to be run apart."""
        ended, wanted = self._sort_out(requests)
        if not wanted:
            return ended, []
        try:
            arrays = gather(wanted, version.signature)
            outputs = await self._attempt(instance, arrays)
            scatter(wanted, version.signature, outputs)
        except Fatal:
            raise
        except Rejected as error:
            failure = rejection(error, Stage.EXECUTOR)
        except Retriable as error:
            failure = Failure(Code.INTERNAL, str(error), Stage.EXECUTOR)
        except Exception as error:  # noqa: BLE001 - a model may raise anything; it ends as an answer
            failure = Failure(
                Code.MODEL_FAILED,
                f"model {version.name} version {version.version}: {type(error).__name__}: {error}",
                Stage.EXECUTOR,
            )
        else:
            self._note(version, instance, wanted)
            return ended + wanted, []
        if len(wanted) == 1:
            log.warning(
                "request_failed", model=version.name, **_identity(wanted[0]), reason=failure.message
            )
            wanted[0].fail(failure)
            return ended + wanted, []
        self._metrics.bisections.inc()
        middle = len(wanted) // 2
        return ended, [wanted[:middle], wanted[middle:]]

    async def _attempt(self, instance: Instance, arrays: Arrays) -> Arrays:
        """Run, and again a few times when the backend says that it may work then."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Retriable),
            stop=stop_after_attempt(RUN_ATTEMPTS),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        ):
            with attempt:
                return await instance.run(arrays)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _sort_out(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Requests whose deadline has passed or whose partition has gone do not run."""
        now_us = self._clock()
        ended: list[Request] = []
        wanted: list[Request] = []
        for request in requests:
            failure = VOID if request.receipt.void else None
            if request.envelope.deadline_ms:
                failure = failure or deadline_passed(request, now_us, Stage.EXECUTOR)
            if failure is None:
                wanted.append(request)
            else:
                request.fail(failure)
                ended.append(request)
        return ended, wanted

    def _note(self, version: ModelVersion, instance: Instance, requests: list[Request]) -> None:
        rows = sum(request.rows for request in requests)
        for request in requests:
            request.compute_us = instance.compute_us
            request.batch_rows = rows
        self._metrics.computed(version.name, instance.compute_us / 1e6)


def _identity(request: Request) -> dict[str, str | int]:
    return {
        "model": request.model,
        "version": request.version,
        "partition": request.partition,
        "offset": request.offset,
    }
