"""Index of the models of a process, in the form of Triton's extension for model repositories.

`RepositoryIndex` is that of a process whose models no call can change; where the control topic says
which models are served, `headrace.control.repository_api` takes its place. Source:
https://github.com/triton-inference-server/server/tree/main/docs/protocol, "Model Repository
Extension".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict

import msgspec

from headrace.errors import Code, Rejected
from headrace.models.version import State

_STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")
"""States by their names at Triton, of which the first one counts for a version with several."""


class IndexEntry(TypedDict):
    """A version in the repository, as Triton's extension for model repositories lists it."""

    name: str
    version: str
    state: str
    reason: str


class IndexOptions(msgspec.Struct):
    """Options of a request for the index; Triton gives no meaning to other fields of this body."""

    ready: bool = False


class ChangeOptions(msgspec.Struct):
    """Parameters of a load (`config`, the JSON of a `config.pbtxt`) or of an unload
    (`unload_dependents`).
    """

    parameters: dict[str, str | bool | int] = {}


class ShownModels(Protocol):
    """The models of a process; implemented by `headrace.models.catalog.ModelCatalog`."""

    def status(self) -> list[dict[str, Any]]: ...


class Unsupported(Rejected):
    """The process does not have the method; the message says what it needs."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_REQUEST, message)


class Overtaken(Rejected):
    """Another change was made first; the message names its generation."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_REQUEST, message)


class RepositoryIndex:
    """The models of a process, which calls cannot change.

    Args:
        models: of this process.
        mode: `models.mode`.

    Attributes:
        can_change: whether calls can load and unload models.
    """

    can_change = False

    def __init__(self, models: ShownModels, mode: str = "all") -> None:
        self._models = models
        self._mode = mode

    async def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Return the versions of all models, and the faults of those that cannot be loaded."""
        return describe_index(self._models.status(), ready_only=ready_only)

    async def load(
        self, model: str, parameters: Mapping[str, object], who: str, timeout_s: float | None = None
    ) -> None:
        """Refuse to load a model. Raises `Unsupported`."""
        raise self._unsupported("load")

    async def unload(
        self, model: str, parameters: Mapping[str, object], who: str, timeout_s: float | None = None
    ) -> None:
        """Refuse to unload a model. Raises `Unsupported`."""
        raise self._unsupported("unload")

    def _unsupported(self, action: str) -> Unsupported:
        return Unsupported(
            f'{action} is not supported: expected models.mode = "explicit", in which calls change '
            f'the models, got "{self._mode}", in which they are those of models.repository'
        )


def describe_index(
    status: Sequence[Mapping[str, Any]],
    unloaded: Mapping[str, Sequence[int]] | None = None,
    *,
    ready_only: bool,
) -> list[IndexEntry]:
    """Return the entries of the index, one for each version.

    While a version serves, its new files may be loading, or cannot be loaded: the entry then has
    the state of what requests get, and the reason of the other.

    Args:
        status: of the versions, see `headrace.models.catalog.ModelCatalog.status`.
        unloaded: further versions of the repository, by model.
        ready_only: leave out all others.
    """
    entries = [
        IndexEntry(
            name=each["name"],
            version=each["version"],
            state=_state_of(each),
            reason=each["reason"],
        )
        for each in status
    ]
    entries += [
        IndexEntry(name=name, version=str(number), state="UNAVAILABLE", reason="unloaded")
        for name, numbers in (unloaded or {}).items()
        for number in numbers
    ]
    entries.sort(
        key=lambda entry: (
            entry["name"],
            int(entry["version"] or 0),
            _STATES.index(entry["state"]),
        )
    )
    found: dict[tuple[str, str], IndexEntry] = {}
    for entry in entries:
        kept = found.setdefault((entry["name"], entry["version"]), entry)
        kept["reason"] = kept["reason"] or entry["reason"]
    return [each for each in found.values() if each["state"] == "READY" or not ready_only]


def _state_of(entry: Mapping[str, Any]) -> str:
    """Return the state by its name at Triton.

    A ready version with a reason was replaced, and is kept for requests that are bound to it.
    """
    match State(entry["state"]):
        case State.READY:
            return "UNLOADING" if entry["reason"] else "READY"
        case State.UNLOADED:  # it is loaded again when a request comes
            return "READY"
        case State.FAILED:
            return "UNAVAILABLE"
        case state:
            return state.upper()
