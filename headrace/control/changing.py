"""Change the wanted models, and wait until the processes have followed: for commands and servers.

`ModelChanges.make` is one change, as a command makes it. `ModelChanges.load_selected` is what
Triton's repository API calls a load: the versions that the model's configuration selects come
beside the others, and only when they are ready everywhere does the default move, and do the others
go. If one cannot be loaded somewhere, the model is wanted again as it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from headrace.config import Settings
from headrace.control.processes import Processes, ProcessReport, open_processes
from headrace.control.topic import ChangeOvertaken, ControlTopic
from headrace.errors import Code, ConfigurationError, NotLoadableHere, Rejected, Retriable
from headrace.log.port import Log
from headrace.models.load_faults import is_fault_of_model
from headrace.models.repositories import open_repository
from headrace.models.wanted import (
    Author,
    Change,
    ChangeRefused,
    Deployment,
    Wanted,
    add_versions,
    find_awaited,
    fold,
    keep_versions,
    make_record,
    require_present,
    restore,
    unload,
)
from headrace.primitives.backoff import Backoff, Pauses
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.protocol.control import ControlRecord, WantedModel
from headrace.protocol.events import UnreadyVersion
from headrace.tuning import TUNING, Tuning

Choose: TypeAlias = Callable[[Sequence[ControlRecord]], Change]
"""Returns the change, given all records so far."""


class LoadFailed(Rejected):
    """A version cannot be loaded; the model is wanted again as it was.

    Args:
        message: what failed where.
        is_callers_fault: the files or the configuration of the model are the reason.
    """

    def __init__(self, message: str, *, is_callers_fault: bool) -> None:
        super().__init__(Code.INVALID_REQUEST if is_callers_fault else Code.MODEL_FAILED, message)


class NoProcess(Retriable):
    """No process was heard that follows the control topic."""


class ModelChanged(ChangeOvertaken):
    """The model was changed by somebody else between the two changes of a call."""


_STOPPED = ", which it does not follow until it is started again"


class Followed(NamedTuple):
    """Progress of a process in following the control topic.

    Attributes:
        generation: the last change that it has read.
        unready: wanted versions that are not ready.
        is_following: False if it has stopped following.
    """

    generation: int
    unready: Sequence[UnreadyVersion]
    is_following: bool = True


class ChangeOutcome(NamedTuple):
    """A change, made or not.

    Attributes:
        record: None if there was nothing to change.
        generation: of the wanted models now.
        processes: those that were heard, if it was waited for them.
        followed: whether they have the versions ready that the change is about.
        failed: whether they have not, and what is missing cannot be loaded, or one follows no more.
    """

    record: ControlRecord | None
    generation: int
    processes: dict[str, ProcessReport]
    followed: bool
    failed: bool = False


class _Written(NamedTuple):
    """A change that was made, unless there was nothing to change.

    Attributes:
        record: None if there was nothing to change.
        generation: of the wanted models now.
        awaited: versions, by model and number, that must be ready for it to be in effect. Not all
            that are wanted: one that has failed may be so for long.
    """

    record: ControlRecord | None
    generation: int
    awaited: Collection[tuple[str, str]]


class ModelChanges:
    """Changes of the wanted models of a deployment.

    Args:
        log_: the log.
        settings: the namespace, and the repository.
        tuning: deadlines.
        followed: returns how far this process itself has followed; None if it has not begun.
            Without it, there is only what the processes announce.
    """

    def __init__(
        self,
        log_: Log,
        settings: Settings,
        tuning: Tuning = TUNING,
        followed: Callable[[], Followed | None] | None = None,
    ) -> None:
        self._log = log_
        self._settings = settings
        self._tuning = tuning.control
        self._repository_tuning = tuning.models
        self._topic = ControlTopic(log_, settings, tuning.control)
        self._followed = followed
        self._writing = asyncio.Lock()  # changes of one process must not overtake each other
        self._written = 0  # changes whose writing has ended

    async def make(
        self,
        choose: Choose,
        author: Author,
        *,
        wait_s: float | None = None,
        dry_run: bool = False,
    ) -> ChangeOutcome:
        """Make one change.

        Args:
            choose: returns the change.
            author: who makes it, and why.
            wait_s: wait for so long at most until all processes have followed, or what is left has
                failed; None for not at all.
            dry_run: return the record, and do not write it.

        Raises:
            ChangeOvertaken: another change was made first.
            ChangeRefused: the change makes no sense.
            ConfigurationError: a topic is missing, or the repository cannot be read.
            LogUnavailable: the outcome is unknown; the topic shows it.
        """
        await self._topic.require()
        if dry_run:
            state = fold(records := await self._topic.read())
            change = choose(records)
            await self._check(state.models, change.apply(state.models))
            snapshots = self._tuning.snapshot_every
            record = make_record(change, state, author, "", _now_ms(), snapshots)
            return ChangeOutcome(record, state.generation, {}, False)
        if wait_s is None:
            record, generation, _ = await self._write(choose, author)
            return ChangeOutcome(record, generation, {}, False)
        # Listen before the change is written, so that no announcement is missed.
        async with open_processes(self._log, self._settings, self._tuning) as processes:
            record, generation, awaited = await self._write(choose, author)
            reports = processes.reports
            has_ended = await processes.listen(
                lambda: all(each.has_ended(generation, awaited) for each in reports.values()),
                wait_s,
            )
        followed = all(each.has_followed(generation, awaited) for each in reports.values())
        if not reports:  # nobody has followed, and nobody has failed
            return ChangeOutcome(record, generation, reports, followed=False)
        failed = has_ended and not followed
        return ChangeOutcome(record, generation, reports, followed, failed)

    async def load_selected(
        self,
        model: str,
        overrides: Mapping[str, Any],
        author: Author,
        timeout_s: float,
    ) -> None:
        """Load the versions that a model's configuration selects, and no others but labelled ones.

        A model that is loaded has its files read again.

        Args:
            model: its name.
            overrides: values for keys of `model.toml`; they replace former ones.
            author: who loads it, and why.
            timeout_s: longest wait for the processes.

        Raises:
            ChangeOvertaken: another change was made first.
            ChangeRefused: there is no such model, or its configuration selects nothing that can be
                served.
            LoadFailed: a process cannot load a version.
            NoProcess: no process was heard.
            Rejected: `DEADLINE_EXCEEDED`: not all processes have followed in time.
            LogUnavailable: the outcome is unknown; the topic shows it.
        """
        await self._topic.require()
        selected = await run_on_daemon_thread(partial(self._select, model, overrides))
        kept = {key: value for key, value in overrides.items() if key != "versions"}
        before: list[WantedModel | None] = []
        deadline_s = asyncio.get_running_loop().time() + timeout_s

        def add(records: Sequence[ControlRecord]) -> Change:
            state = fold(records)
            before[:] = [state.models.get(model)]
            # There were never more readings than changes. So a process that has not followed the
            # end of an attempt that failed does not take its reading then for this one.
            return add_versions(model, selected, kept, reads=state.generation + 1)

        async with open_processes(self._log, self._settings, self._tuning) as processes:
            record, generation, _ = await self._write(add, author)
            added = None if record is None else record.after[model]
            needed = {*selected, *(() if added is None else added.labels.values())}
            versions = {(model, version) for version in needed}
            try:
                await self._wait_until_followed(processes, versions, generation, deadline_s)
            except LoadFailed as error:
                why = Author(author.who, f"load failed: {error.message}")
                undo = _unless_changed(model, added, restore(model, before[0]))
                try:
                    await self._finish(undo, why)
                except (ConfigurationError, Retriable) as left:
                    message = f"{error.message}; it is still wanted: {left}"
                    raise LoadFailed(message, is_callers_fault=False) from error
                raise
            then = _unless_changed(model, added, keep_versions(model, selected))
            _, generation, _ = await self._finish(then, author)
            await self._wait_until_followed(processes, versions, generation, deadline_s)

    async def unload_all(
        self, model: str, author: Author, timeout_s: float, is_gone: Callable[[], bool]
    ) -> None:
        """Unload a model with all versions and labels.

        Args:
            model: its name.
            author: who unloads it, and why.
            timeout_s: longest wait for the processes.
            is_gone: whether this process itself does not serve it any more.

        Raises:
            ChangeOvertaken: another change was made first.
            ChangeRefused: the model is not loaded.
            NoProcess: no process was heard.
            Rejected: `DEADLINE_EXCEEDED`: not all processes have followed in time.
            LogUnavailable: the outcome is unknown; the topic shows it.
        """
        await self._topic.require()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        async with open_processes(self._log, self._settings, self._tuning) as processes:
            _, generation, _ = await self._write(lambda _: unload(model), author)
            await self._wait_until_followed(processes, set(), generation, deadline_s, is_gone)

    async def list_versions(self) -> dict[str, list[int]]:
        """Return the versions in the repository, by model.

        Raises:
            ConfigurationError: it cannot be read.
        """
        repository = open_repository(self._settings, self._repository_tuning)
        return await run_on_daemon_thread(repository.list_versions)

    async def _write(self, choose: Choose, author: Author) -> _Written:
        """Make a change of what the topic says now.

        A repository that does not answer delays only the change that it has to be asked about: it
        is asked before the turn of this change comes, and again if another one of this process was
        written meanwhile.
        """
        for _ in range(self._tuning.finish_attempts - 1):
            written = self._written
            change, state = await self._choose(choose)
            async with self._writing:
                if self._written == written:
                    return await self._write_chosen(change, state, author)
        async with self._writing:  # they come too fast: the others have to wait for this one
            change, state = await self._choose(choose)
            return await self._write_chosen(change, state, author)

    async def _choose(self, choose: Choose) -> tuple[Change, Deployment]:
        """Choose a change of what the topic says now, which is returned as well, and check it."""
        state = fold(records := await self._topic.read())
        change = choose(records)
        await self._check(state.models, change.apply(state.models))
        return change, state

    async def _write_chosen(self, change: Change, state: Deployment, author: Author) -> _Written:
        try:
            record = await self._topic.write(change, state.generation, author, _now_ms())
        finally:
            self._written += 1  # last: what was read before the end of this may lack the change
        if record is not None:
            return _Written(record, record.generation, find_awaited(record))
        awaited = {
            (name, number)
            for name, each in state.models.items()
            if change.model in (None, name)
            for number in each.versions
        }
        return _Written(None, state.generation, awaited)

    async def _finish(self, choose: Choose, author: Author) -> _Written:
        """Make the second change of a call, although changes of other models come first.

        The first change is made already, so to give up would leave the model half-way. The change
        must be one of `_unless_changed`, whose error ends the attempts.

        Raises:
            ChangeOvertaken: the model itself was changed, or too many attempts were overtaken.
        """
        tuning = self._tuning
        pauses = Pauses(Backoff(tuning.retry_first_s, tuning.retry_max_s))
        for _ in range(tuning.finish_attempts - 1):
            try:
                return await self._write(choose, author)
            except ModelChanged:
                raise
            except ChangeOvertaken:
                await pauses.sleep()
        return await self._write(choose, author)

    async def _check(self, before: Wanted, after: Wanted) -> None:
        """Check that the repository has what a change loads, and can be read with its overrides.

        Raises:
            ChangeRefused: it has not, or cannot.
            ConfigurationError: the repository cannot be read.
        """
        none = WantedModel(versions=[], default="")
        loaded = {name: (each, before.get(name, none)) for name, each in after.items()}
        is_new = any(set(each.versions) - set(old.versions) for each, old in loaded.values())
        overridden = {
            name: each.overrides
            for name, (each, old) in loaded.items()
            if each.overrides and each.overrides != old.overrides
        }
        if is_new:
            require_present(before, after, await self.list_versions())
        for name, overrides in overridden.items():
            await run_on_daemon_thread(partial(self._select, name, overrides))

    def _select(self, model: str, overrides: Mapping[str, Any]) -> list[str]:
        """Return the versions that a model's configuration selects. Blocks.

        Raises:
            ChangeRefused: there is no such model, or its configuration cannot be used.
            NotLoadableHere: the repository cannot be read.
        """
        repository = open_repository(self._settings, self._repository_tuning)
        try:
            return [*map(str, repository.select(model, overrides))]
        except ConfigurationError as error:
            kind = ChangeRefused if is_fault_of_model(error) else NotLoadableHere
            raise kind(repository.shorten(str(error))) from error

    async def _wait_until_followed(
        self,
        processes: Processes,
        versions: Collection[tuple[str, str]],
        generation: int,
        deadline_s: float,
        has_ended: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait until all processes, and this one, have followed a change.

        Args:
            processes: those that are heard.
            versions: that have to be ready, by model and number.
            generation: of the change.
            deadline_s: of the event loop's clock.
            has_ended: what must be true besides.

        Raises:
            LoadFailed, NoProcess: see `load_selected`.
            Rejected: `DEADLINE_EXCEEDED`: not all have followed in time.
        """
        reports = processes.reports

        def heard() -> dict[str, Followed]:
            """Return how far each process has followed, this one included."""
            found = {
                name: Followed(each.generation, each.unready, each.is_following)
                for name, each in reports.items()
            }
            if self._followed is not None:
                found["this process"] = self._followed() or Followed(-1, ())
            return found

        def unready() -> dict[str, list[str]]:
            """Return what each process waits for."""
            return {
                name: [
                    each.line for each in process.unready if (each.name, each.version) in versions
                ]
                if process.is_following and process.generation >= generation
                else [f"generation {generation}" + ("" if process.is_following else _STOPPED)]
                for name, process in heard().items()
            }

        def failures() -> list[UnreadyVersion]:
            """Return what processes cannot load."""
            return [
                each
                for process in heard().values()
                if process.is_following and process.generation >= generation
                for each in process.unready
                if (each.name, each.version) in versions and not each.is_under_way
            ]

        followed = await processes.listen(
            lambda: bool(failures()) or (not any(unready().values()) and has_ended()),
            max(0.0, deadline_s - asyncio.get_running_loop().time()),
        )
        if failed := failures():
            raise LoadFailed(
                "; ".join(dict.fromkeys(each.line for each in failed)),
                is_callers_fault=all(each.is_rejected for each in failed),
            )
        if not reports:
            raise NoProcess(
                f"generation {generation}: no process was heard that runs with "
                'models.mode = "explicit"'
            )
        if not followed:
            left = [
                f"{name} waits for {', '.join(each)}" for name, each in unready().items() if each
            ]
            raise Rejected(
                Code.DEADLINE_EXCEEDED,
                f"generation {generation}: not all processes have followed in time: "
                + ("; ".join(left) or "the model is still served here"),
            )


def _unless_changed(model: str, expected: WantedModel | None, change: Change) -> Choose:
    """Return the change, unless the model is not wanted as expected any more."""

    def choose(records: Sequence[ControlRecord]) -> Change:
        if fold(records).models.get(model) != expected:
            changes = [each for each in records if model in each.after]
            seen = [each.generation for each in changes if each.after[model] == expected]
            raise ModelChanged(seen[-1], changes[-1])
        return change

    return choose


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
