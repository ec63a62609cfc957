"""Events by which executors announce themselves on `events` to batchers in other processes.

Like the other messages (`headrace.protocol.messages`) they are MessagePack maps: unknown fields
are ignored, new fields have defaults, and no field is renamed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec import Struct

from headrace.protocol.messages import Name

NOT_CONTROLLED: Final = -1
"""Generation of a process that does not follow the control topic."""
NOT_READ: Final = "not read yet"
"""Reason of a wanted version that the last scan of the repository did not look for."""


class UnreadyVersion(NamedTuple):
    """A wanted version that is not ready.

    Attributes:
        name: of the model.
        version: its number.
        reason: why it is not ready, for people.
        is_under_way: True if it becomes ready unless something goes wrong; False if it has failed.
        is_rejected: it has failed because of the model's files or configuration, so that no process
            can load it; False if the reason is another one, or is not known.
    """

    name: str
    version: str
    reason: str
    is_under_way: bool = False
    is_rejected: bool = False

    @property
    def line(self) -> str:
        """Return it as `name/version: reason`."""
        return f"{self.key}: {self.reason}"

    @property
    def key(self) -> str:
        """Return it as `name/version`."""
        return f"{self.name}/{self.version}"


class HostedModel(Struct, kw_only=True, omit_defaults=True):
    """A model version that is ready on an executor.

    Each of the `instances` runs one batch at a time. `max_batch_size` is in rows; it is 1 if
    requests must not share runs, for the reason in `batching_off`. `memory_bytes` is what all its
    instances have taken while they were loaded, by device (`host`, `cuda:0`), without what could
    not be measured.
    """

    name: Name
    version: Name
    instances: int
    max_batch_size: int
    batching_off: str = ""
    memory_bytes: dict[str, int] = {}


class Completion(Struct, kw_only=True, omit_defaults=True):
    """All requests of a batch have ended. `compute_us` is the duration of its run of `rows` rows;
    0 if it was not run as one batch. `stay_us` is the time that the executor had the batch, and
    `busy_us` the part of it after the previous batch ended: the time per batch under full load.
    """

    batch_id: str
    model: str
    version: str
    shape_class: list[int] = []
    rows: int = 0
    compute_us: int = 0
    stay_us: int = 0
    busy_us: int = 0


class ExecutorEvent(Struct, kw_only=True, omit_defaults=True):
    """The value of an `events` record: the models of an executor, and the batches that it has
    completed since its last event.

    `partitions` are those of `batches` that it reads. An executor without an event for
    `silent_after_ms` may be considered dead. A process that follows the control topic says up to
    which `generation`, which wanted versions are not ready, as `name/version: reason`, which of
    these have `failed`, as `name/version`, which of the failed ones are `rejected` because of the
    model's files or configuration, and which `stages` it has. `is_following` is False once it has
    stopped following: its generation may be of a topic that is no more.
    """

    executor: Name
    silent_after_ms: int
    partitions: list[int] = []
    models: list[HostedModel] = []
    completions: list[Completion] = []
    leaving: bool = False
    generation: int = NOT_CONTROLLED
    unready: list[str] = []
    stages: list[str] = []
    failed: list[str] = []
    rejected: list[str] = []
    is_following: bool = True

    def unready_versions(self) -> list[UnreadyVersion]:
        """Return the wanted versions that are not ready. The text of a reason has no meaning."""
        found = []
        for line in self.unready:
            key, _, reason = line.partition(": ")
            name, _, version = key.rpartition("/")
            has_failed = key in self.failed
            is_rejected = has_failed and key in self.rejected
            found.append(UnreadyVersion(name, version, reason, not has_failed, is_rejected))
        return found
