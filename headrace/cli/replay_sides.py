"""Sides of `headrace replay compare`: directories, versions, pipelines."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

from headrace.client.rpc import RpcClient
from headrace.config import ModelSettings, Settings
from headrace.errors import ConfigurationError
from headrace.models.repository import FoundModel, Repository
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.logs import configure_logging
from headrace.tools.replay.compare.asking import PipelineSubject


class Directories(NamedTuple):
    """Two repositories."""

    current: Path
    candidate: Path


class Repositories(NamedTuple):
    """Repositories as given by the options.

    Attributes:
        current: the directory of the current models.
        candidate: the candidate's, or None for `candidate_version` of `current`.
        current_version: the current version; None for what `current` serves.
        model: the compared model, in the form of a filter; None for all.
    """

    current: Path
    candidate: Path | None
    candidate_version: int | None
    current_version: int | None
    model: str | None

    @property
    def current_name(self) -> str:
        """Name of the current side, for display."""
        version = f", version {self.current_version}" if self.current_version else ""
        return f"{self.current}{version}"

    @property
    def candidate_name(self) -> str:
        """Name of the candidate, for display."""
        if self.candidate is not None:
            return str(self.candidate)
        return f"{self.current}, version {self.candidate_version}"

    def options(self) -> list[str]:
        """Return the same as command line options."""
        words = ["--models", str(self.current)]
        if self.candidate is not None:
            words += ["--candidate", str(self.candidate)]
        if self.candidate_version is not None:
            words += ["--candidate-version", str(self.candidate_version)]
        if self.current_version is not None:
            words += ["--current-version", str(self.current_version)]
        return words


@contextmanager
def repositories(settings: Settings, chosen: Repositories) -> Iterator[Directories]:
    """Yield the two directories; for a named version, a temporary one made of links.

    Raises:
        ConfigurationError: there is no such directory or version.
    """
    if chosen.candidate is not None:
        yield Directories(chosen.current, chosen.candidate)
        return
    assert chosen.candidate_version is not None
    found = [
        model
        for model in Repository(chosen.current, settings).scan()
        if chosen.model is None or model.name == chosen.model.partition("/")[0]
    ]
    with tempfile.TemporaryDirectory(prefix="headrace-compare-") as place:
        made = Directories(Path(place, "current"), Path(place, "candidate"))
        _link(found, chosen.candidate_version, made.candidate)
        if chosen.current_version is None:
            _require_another(found, chosen.candidate_version)
            made = made._replace(current=chosen.current)
        else:
            _link(found, chosen.current_version, made.current)
        yield made


def _link(models: list[FoundModel], version: int, target: Path) -> None:
    """Link a repository that answers with this version, whichever version a request names."""
    linked = 0
    for model in models:
        directory = (model.directory / str(version)).resolve()
        if not directory.is_dir():
            continue
        linked += 1
        place = target / model.name
        place.mkdir(parents=True)
        for path in model.directory.iterdir():
            if path.is_file():
                (place / path.name).symlink_to(path.resolve())
        for served in {each.version for each in model.versions} or {str(version)}:
            (place / served).symlink_to(directory, target_is_directory=True)
    if not linked:
        names = ", ".join(model.name for model in models) or "no model"
        raise ConfigurationError(f"version {version}: expected it of {names}, but there is none")


def _require_another(models: list[FoundModel], version: int) -> None:
    for model in models:
        served = [int(each.version) for each in model.versions]
        if served and max(served) == version:
            raise ConfigurationError(
                f"{model.name}: version {version} is the one that is served; name the one to "
                "compare it with (--current-version)"
            )


@asynccontextmanager
async def ask_pipeline(settings: Settings, models: Path) -> AsyncIterator[PipelineSubject]:
    """Run the four services with the models of a directory, on their own embedded log.

    Raises:
        ConfigurationError: the models cannot be served.
    """
    configure_logging("warning")
    embedded = settings.model_copy(
        update={"kafka": None, "models": ModelSettings(repository=models)}
    )
    async with (
        open_log(embedded) as log,
        running(Pipeline(embedded, log)),
        RpcClient(log, embedded) as rpc,
    ):
        yield PipelineSubject(rpc)
