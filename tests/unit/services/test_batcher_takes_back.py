"""Requests that wait for a version which cannot be loaded: they are decided about anew, or end."""

from __future__ import annotations

from headrace.errors import Code, Rejected
from headrace.protocol.messages import Failure, IngestedRequest, Request
from headrace.services.batcher.batcher import DynamicBatcher
from headrace.services.batcher.fair_queue import BatchLimits
from headrace.topics import Stage
from headrace.transport.channels import ModelKey
from tests.support.batching import NOW_MS, request_of
from tests.support.work import NOW_US, Limits

OLD = ("digits", "1")
NEW = ("digits", "2")
GONE = Failure(Code.MODEL_NOT_READY, "no memory", Stage.BATCHER, 1000)


class Versions:
    """The limits of the versions that are served; others are rebound to the first of these."""

    def __init__(self, *served: ModelKey) -> None:
        self.limits: dict[ModelKey, BatchLimits] = {key: Limits() for key in served}
        self.batcher = DynamicBatcher(self.find, "test", self.rebind)

    def find(self, model: str, version: str) -> BatchLimits:
        """Limits of a version that is served."""
        if (model, version) not in self.limits:
            raise Rejected(Code.MODEL_NOT_READY, f"{model}/{version} is not here")
        return self.limits[model, version]

    def rebind(self, request: IngestedRequest, gone: Rejected) -> None:
        """Bind a request to a version that is served."""
        if not self.limits:
            raise gone
        request.version = next(iter(self.limits))[1]


def offsets(versions: Versions, key: ModelKey) -> list[int]:
    """Offsets of the next batch."""
    batch = versions.batcher.next(key, NOW_US)
    return [] if batch is None else [request.offset for request in batch.requests]


def test_requests_move_to_another_version_with_age_and_deadline() -> None:
    """Nobody loses the place that it had, and deadlines hold."""
    versions = Versions(OLD)
    old, late = request_of(arrived_us=NOW_US - 5000), request_of(in_ms=10)
    for request in (late, old):
        versions.batcher.add(request)
    del versions.limits[OLD]
    versions.limits[NEW] = Limits()

    versions.batcher.reassign(OLD)

    assert not versions.batcher.has_waiting(OLD)
    assert versions.batcher.has_waiting(NEW)
    assert [old.arrived_us, old.version] == [NOW_US - 5000, "2"]
    assert versions.batcher.earliest_deadline_us() == (NOW_MS + 10) * 1000
    versions.batcher.expire((NOW_MS + 10) * 1000)
    assert versions.batcher.ended == [late]
    assert offsets(versions, NEW) == [old.offset]
    assert len(versions.batcher) == 0


def test_requests_that_no_version_takes_end() -> None:
    """Each of them has the reason."""
    versions = Versions(OLD)
    requests = [request_of() for _ in range(3)]
    versions.batcher.add_all(requests, NOW_US)
    versions.limits.clear()

    versions.batcher.reassign(OLD)

    assert versions.batcher.ended == requests
    assert {code_of(request) for request in requests} == {Code.MODEL_NOT_READY}
    assert len(versions.batcher) == 0


def code_of(request: Request) -> str:
    """Code of a request that has failed."""
    assert request.failure is not None
    return request.failure.code


def test_refused_version_ends_its_requests_alone() -> None:
    """The queue takes later requests as before."""
    versions = Versions(OLD, NEW)
    first, other, second = request_of(), request_of(), request_of()
    other.version = "2"
    versions.batcher.add(first)
    versions.batcher.add(other)

    versions.batcher.refuse(OLD, GONE)
    versions.batcher.add(second)

    assert (versions.batcher.ended, first.failure) == ([first], GONE)
    assert offsets(versions, OLD) == [second.offset]
    assert offsets(versions, NEW) == [other.offset]


def test_rebound_request_joins_those_that_wait_for_reloaded_version() -> None:
    """The version was loaded anew while requests waited, and has other limits: none is lost."""
    versions = Versions(OLD, NEW)
    waiting, rebound = request_of(), request_of()
    waiting.version = "2"
    versions.batcher.add(waiting)
    del versions.limits[OLD]
    versions.limits[NEW] = Limits()

    versions.batcher.add(rebound)

    assert len(versions.batcher) == 2
    assert offsets(versions, NEW) == [waiting.offset, rebound.offset]


def test_waiting_requests_get_limits_of_version_that_was_loaded_anew() -> None:
    """Under load the queue may not be empty for hours, and limits are lowered under load."""
    versions = Versions(OLD)
    requests = [request_of() for _ in range(5)]
    versions.batcher.add_all(requests, NOW_US)
    versions.limits[OLD] = Limits(max_batch_size=2)

    versions.batcher.renew_limits(OLD)

    batches = [offsets(versions, OLD) for _ in range(3)]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [one for batch in batches for one in batch] == [one.offset for one in requests]


def test_requests_wait_for_the_last_batches_of_version_that_is_gone() -> None:
    """Its instances run what waits for it before they are unloaded."""
    versions = Versions(OLD)
    request = request_of()
    versions.batcher.add(request)
    del versions.limits[OLD]

    versions.batcher.renew_limits(OLD)

    assert versions.batcher.ended == []
    assert offsets(versions, OLD) == [request.offset]
