"""What executors say of themselves on `events`, for batchers in other processes.

Like the other messages (`headrace.protocol.messages`) these are MessagePack maps: unknown fields
are ignored, new fields have defaults, nothing is renamed.
"""

from __future__ import annotations

from msgspec import Struct

from headrace.protocol.messages import Name


class HostedModel(Struct, kw_only=True, omit_defaults=True):
    """A model version that an executor has ready.

    `instances` run one batch each at a time. `max_batch_size` is in rows: 1 where requests must
    not share runs, for the reason `batching_off`.
    """

    name: Name
    version: Name
    instances: int
    max_batch_size: int
    batching_off: str = ""


class Completion(Struct, kw_only=True, omit_defaults=True):
    """All requests of a batch have ended. `compute_us` is what its run of so many rows took; 0
    where it was not run as one. `stay_us` is how long the executor had it, and `busy_us` how long
    of that since the batch before it ended: what each batch takes while there are always some.
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
    """The value of an `events` record: what an executor can do, and has done since the last one.

    `partitions` of `batches` are those that it reads. Who has not heard of it for
    `silent_after_ms` may take it for dead.
    """

    executor: Name
    silent_after_ms: int
    partitions: list[int] = []
    models: list[HostedModel] = []
    completions: list[Completion] = []
    leaving: bool = False
