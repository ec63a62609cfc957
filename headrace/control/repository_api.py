"""Triton's model repository API of a process that follows the control topic.

A load and an unload are changes on the topic, like those of `headrace models`, and are answered
when all processes have followed. Source:
https://github.com/triton-inference-server/server/tree/main/docs/protocol, "Model Repository
Extension".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.config import Settings
from headrace.control.changing import Followed, ModelChanges
from headrace.control.topic import ChangeOvertaken
from headrace.errors import Code, ConfigurationError, Rejected, Retriable
from headrace.log.port import Log
from headrace.models.index import (
    IndexEntry,
    Overtaken,
    RepositoryIndex,
    ShownModels,
    describe_index,
)
from headrace.models.wanted import Author, ChangeRefused
from headrace.tuning import TUNING, Tuning

_CONFIG, _FILE, _DEPENDENTS = "config", "file:", "unload_dependents"


class RepositoryUnavailable(Retriable):
    """The repository of models cannot be read now."""


class ControlledRepository(RepositoryIndex):
    """The models of a process, which calls change by the control topic.

    Args:
        log_: the log.
        settings: the namespace, and the repository.
        models: of this process.
        followed: returns how far this process has followed the topic; None before it has begun.
        tuning: deadlines.
    """

    can_change = True

    def __init__(
        self,
        log_: Log,
        settings: Settings,
        models: ShownModels,
        followed: Callable[[], Followed | None],
        tuning: Tuning = TUNING,
    ) -> None:
        super().__init__(models, settings.models.mode)
        self._changes = ModelChanges(log_, settings, tuning, followed)
        self._timeout_s = tuning.control.change_timeout_s
        self._most_characters = tuning.control.config_characters
        self._reading: asyncio.Task[dict[str, list[int]]] | None = None

    async def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Return the versions of the repository; only loaded ones if it is unavailable.

        Versions that are not loaded are `UNAVAILABLE`, with the reason `unloaded`.
        """
        unloaded: dict[str, list[int]] = {}
        if not ready_only:
            # A reading cannot be ended. Calls at the same time share one, which goes on without
            # them: otherwise each caller that hangs up would leave a thread behind.
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._list_versions(), name="index-versions")
            unloaded = await asyncio.shield(self._reading)
        status = self._models.status()
        shown = {(each["name"], each["version"]) for each in status}
        return describe_index(
            status,
            {
                name: [number for number in numbers if (name, str(number)) not in shown]
                for name, numbers in unloaded.items()
            },
            ready_only=ready_only,
        )

    async def _list_versions(self) -> dict[str, list[int]]:
        """Return the versions in the repository; none if it is unavailable."""
        try:
            return await self._changes.list_versions()
        except ConfigurationError:
            return {}

    async def load(
        self, model: str, parameters: Mapping[str, object], who: str, timeout_s: float | None = None
    ) -> None:
        """Load a model, as the repository and the parameters configure it, and wait for it.

        Args:
            model: its name.
            parameters: `config`, the JSON of a `config.pbtxt`, whose values go over the model's.
            who: recorded in the history.
            timeout_s: longest wait; there is a limit beside it.

        Raises:
            Overtaken: another change was made first.
            Rejected: `INVALID_REQUEST`: a parameter has no counterpart or is too large, or the
                model is not there, or its files or configuration cannot be served;
                `MODEL_FAILED`: it cannot be loaded for another reason. Everything is as before;
                `DEADLINE_EXCEEDED`: not all processes have loaded it in time.
            Retriable: the log or the repository is unavailable.
        """
        text = ""
        for name, value in parameters.items():
            if name.startswith(_FILE):
                expected = "the files of models in models.repository alone"
                raise _wrong_parameter(name, expected, "a file")
            if name != _CONFIG:
                raise _wrong_parameter(name, f"{_CONFIG} alone", "another one")
            if not isinstance(value, str):
                raise _wrong_parameter(name, "JSON in a string", type(value).__name__)
            if len(value) > self._most_characters:
                expected = f"at most {self._most_characters} characters"
                raise _wrong_parameter(name, expected, str(len(value)))
            text = value
        # Protobuf reads JSON in Python, which takes a second for 1 MB.
        overrides = await asyncio.to_thread(_read_overrides, text, model) if text else {}
        with _errors_of_calls():
            await self._changes.load_selected(
                model, overrides, Author(who, "repository API"), self._limit_s(timeout_s)
            )

    async def unload(
        self, model: str, parameters: Mapping[str, object], who: str, timeout_s: float | None = None
    ) -> None:
        """Unload a model with all versions and labels, and wait for it; see `load`.

        No model depends on another one, so `unload_dependents` has no effect.

        Raises:
            Overtaken: another change was made first.
            Rejected: `INVALID_REQUEST`: a parameter has no counterpart, or the model is not loaded;
                `DEADLINE_EXCEEDED`: not all processes have followed in time.
            Retriable: the log or the repository is unavailable.
        """
        for name, value in parameters.items():
            if name != _DEPENDENTS:
                raise _wrong_parameter(name, f"{_DEPENDENTS} alone", "another one")
            if not isinstance(value, bool):
                raise _wrong_parameter(name, "true or false", type(value).__name__)
        with _errors_of_calls():
            await self._changes.unload_all(
                model,
                Author(who, "repository API"),
                self._limit_s(timeout_s),
                lambda: not any(each["name"] == model for each in self._serving()),
            )

    def _serving(self) -> list[IndexEntry]:
        return describe_index(self._models.status(), ready_only=True)

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)


@contextmanager
def _errors_of_calls() -> Iterator[None]:
    """Turn errors that end a command into those that answer a call."""
    try:
        yield
    except ChangeOvertaken as error:
        raise Overtaken(str(error)) from error
    except ChangeRefused as error:
        raise Rejected(Code.INVALID_REQUEST, "; ".join(str(error).splitlines())) from error
    except ConfigurationError as error:
        raise RepositoryUnavailable(str(error)) from error


def _read_overrides(text: str, model: str) -> Mapping[str, Any]:
    """Return the values of a configuration in Triton's JSON. Raises `Rejected`."""
    from headrace.models.triton_config import parse_overrides  # with Protobuf, for few requests

    try:
        return parse_overrides(text, model)
    except ValueError as error:
        lines = "; ".join(str(error).splitlines())
        raise Rejected(Code.INVALID_REQUEST, f"parameters.{_CONFIG}: {lines}") from error


def _wrong_parameter(name: str, expected: str, got: str) -> Rejected:
    where = f"parameters.{name[:80]}"
    return Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got=got)
