"""When requests may be sent to a version, by what the processes of a deployment announce."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.control.announced import AnnouncedVersions
from headrace.protocol.events import ExecutorEvent, HostedModel, UnreadyVersion
from headrace.topics import Stage

INGEST, BATCHER, EXECUTOR = (Stage.INGEST,), (Stage.BATCHER,), (Stage.EXECUTOR,)


def event(
    name: str,
    stages: Sequence[Stage],
    *versions: str,
    generation: int = 1,
    unready: Sequence[str] = (),
    failed: Sequence[str] = (),
    rejected: Sequence[str] = (),
) -> ExecutorEvent:
    """An announcement of a process with these versions of `digits` ready."""
    return ExecutorEvent(
        executor=name,
        silent_after_ms=1000,
        models=[
            HostedModel(name="digits", version=each, instances=1, max_batch_size=8)
            for each in versions
        ],
        generation=generation,
        unready=[*unready],
        stages=[*stages],
        failed=[*failed],
        rejected=[*rejected],
    )


def waits(reason: str) -> UnreadyVersion:
    """Version 1 of `digits`, which becomes ready later."""
    return UnreadyVersion("digits", "1", reason, is_under_way=True)


def test_batcher_waits_for_enough_executors() -> None:
    """One of two is too few."""
    announced = AnnouncedVersions(BATCHER, 2, 10.0)
    announced.apply([event("a", EXECUTOR, "1")], 0.0)
    assert announced.awaited("digits", "1", 1) == waits("announced by 1 of 2 executors: loading")
    announced.apply([event("b", EXECUTOR, "1")], 0.0)
    assert announced.awaited("digits", "1", 1) is None


def test_ingest_waits_for_every_batcher() -> None:
    """A batcher of any of them may read the item."""
    announced = AnnouncedVersions(INGEST, 1, 10.0)
    announced.apply([event("e", EXECUTOR, "1"), event("a", BATCHER, "1")], 0.0)
    assert announced.awaited("digits", "1", 1) is None
    announced.apply([event("b", BATCHER)], 0.0)
    assert announced.awaited("digits", "1", 1) == waits("announced by 1 of 2 batchers: loading")


def test_ingest_without_batcher_heard_waits() -> None:
    """No batcher has announced that it can pass the request on."""
    announced = AnnouncedVersions(INGEST, 1, 10.0)
    announced.apply([event("e", EXECUTOR, "1")], 0.0)
    assert announced.awaited("digits", "1", 1) == waits("announced by 0 of 1 batchers: loading")


def test_announcement_of_earlier_generation_does_not_count() -> None:
    """It may be about the files before they changed; nor does a version that is loaded again."""
    announced = AnnouncedVersions(BATCHER, 1, 10.0)
    announced.apply([event("e", EXECUTOR, "1")], 0.0)
    assert announced.awaited("digits", "1", 2)
    loading = event("e", EXECUTOR, "1", generation=2, unready=["digits/1: loading"])
    announced.apply([loading], 0.0)
    assert announced.awaited("digits", "1", 2)
    announced.apply([event("e", EXECUTOR, "1", generation=2)], 0.0)
    assert announced.awaited("digits", "1", 2) is None


def test_failure_of_executor_is_the_reason() -> None:
    """Each process shows why a version is not served."""
    announced = AnnouncedVersions(INGEST, 1, 10.0)
    unready = ["digits/1: no such file"]
    announced.apply([event("e", EXECUTOR, unready=unready, failed=["digits/1"])], 0.0)
    assert announced.awaited("digits", "1", 1) == UnreadyVersion(
        "digits", "1", "executor e: no such file", is_under_way=False
    )


def test_silent_process_is_forgotten() -> None:
    """A batcher that has ended keeps no version from being used."""
    announced = AnnouncedVersions(INGEST, 1, 10.0)
    announced.apply([event("gone", BATCHER)], 0.0)
    announced.apply([event("e", EXECUTOR, "1"), event("b", BATCHER, "1")], 11.0)
    assert announced.awaited("digits", "1", 1) is None


def test_version_is_needed_while_an_earlier_stage_announces_it() -> None:
    """Announcements of the same stage or a later one keep no version: those wait for this stage."""
    announced = AnnouncedVersions(BATCHER, 1, 10.0)
    announced.apply(
        [event("i", INGEST, "1"), event("b", BATCHER, "2"), event("e", EXECUTOR, "3")], 0.0
    )
    assert announced.needed() == {("digits", "1")}
    announced.apply([event("i", INGEST)], 0.0)
    assert announced.needed() == set()


@pytest.mark.parametrize("reason", ["no such file", "a hook ended with: loading", "not read yet"])
def test_reason_of_failure_may_have_any_text(reason: str) -> None:
    """Model code can raise an error with any message; only `failed` says that it is one."""
    announced = AnnouncedVersions(BATCHER, 1, 10.0)
    unready = [f"digits/1: {reason}"]
    announced.apply([event("e", EXECUTOR, unready=unready, failed=["digits/1"])], 0.0)
    assert announced.awaited("digits", "1", 1) == UnreadyVersion(
        "digits", "1", f"executor e: {reason}", is_under_way=False
    )


@pytest.mark.parametrize(
    ("rejected", "is_rejected"),
    [([["digits/1"], ["digits/1"]], True), ([["digits/1"], []], False), ([[], []], False)],
    ids=["by all", "by one", "by none"],
)
def test_version_is_rejected_if_all_executors_that_failed_say_so(
    rejected: list[list[str]], is_rejected: bool
) -> None:
    """A release before this one does not say it, and another reason is the operator's matter."""
    announced = AnnouncedVersions(BATCHER, 1, 10.0)
    unready = ["digits/1: no"]
    announced.apply(
        [
            event(name, EXECUTOR, unready=unready, failed=["digits/1"], rejected=each)
            for name, each in zip("ab", rejected, strict=True)
        ],
        0.0,
    )
    awaited = announced.awaited("digits", "1", 1)
    assert awaited is not None
    assert awaited.is_rejected == is_rejected


def test_version_that_has_not_failed_is_not_rejected() -> None:
    """Whatever else an announcement says of it."""
    [unready] = event(
        "e", EXECUTOR, unready=["digits/1: no"], rejected=["digits/1"]
    ).unready_versions()
    assert unready == UnreadyVersion("digits", "1", "no", is_under_way=True)


def test_reason_of_loading_version_may_have_any_text() -> None:
    """A version that is loaded again says why."""
    announced = AnnouncedVersions(BATCHER, 1, 10.0)
    unready = ["digits/1: loading again, since version 2 failed: out of memory"]
    announced.apply([event("e", EXECUTOR, unready=unready)], 0.0)
    assert announced.awaited("digits", "1", 1) == waits("announced by 0 of 1 executors: loading")
