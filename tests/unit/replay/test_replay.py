"""The run: in its pace by a clock in the test's hands, and its account."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.log.errors import LogUnavailable
from headrace.log.port import Record, SentBatch
from headrace.tools.replay.recording import identity
from headrace.tools.replay.replay import FixedRate, OriginalSpacing, Pace, Replay, Unpaced
from tests.support.clock import ManualClock
from tests.support.recordings import GivenRecording, recorded


class Sleeper:
    """A clock that moves when somebody sleeps on it, and by what sending takes."""

    def __init__(self) -> None:
        self.clock = ManualClock(1_000_000)
        self.start_s = self.clock.now_s()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance_ms(round(seconds * 1000))
        await asyncio.sleep(0)

    @property
    def passed_ms(self) -> int:
        return round((self.clock.now_s() - self.start_s) * 1000)


class KeepingSink:
    """Keeps what it is given, and when."""

    def __init__(self, sleeper: Sleeper, takes_ms: Sequence[int] = ()) -> None:
        self.turns: list[tuple[int, int]] = []
        self.records: list[Record] = []
        self.failure: Exception | None = None
        self._sleeper = sleeper
        self._takes_ms = list(takes_ms)

    async def send(self, records: Sequence[Record]) -> Sequence[SentBatch]:
        self.turns.append((self._sleeper.passed_ms, len(records)))
        self.records += records
        if self._takes_ms:
            self._sleeper.clock.advance_ms(self._takes_ms.pop(0))
        acknowledged = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            acknowledged.set_exception(self.failure)
            acknowledged.exception()  # as the log's producers do: nobody has to await it
        else:
            acknowledged.set_result(None)
        return [SentBatch(len(records), acknowledged)]

    async def finish(self) -> None:
        """Nothing more comes."""


RECORDS = [recorded(number, spacing_ms=10) for number in range(4)]


def replay(sink: KeepingSink, pace: Pace, sleeper: Sleeper, **more: object) -> Replay:
    """A run of four records on the sleeper's time."""
    return Replay(
        GivenRecording(RECORDS, 3),
        pace,
        sink,
        clock=sleeper.clock.now_s,
        sleep=sleeper.sleep,
        **more,  # type: ignore[arg-type]  # the rest of the constructor's
    )


@pytest.mark.parametrize(
    ("pace", "turns"),
    [
        (OriginalSpacing(), [(0, 1), (10, 1), (20, 1), (30, 1)]),
        (OriginalSpacing(0.5), [(0, 1), (20, 1), (40, 1), (60, 1)]),
        (FixedRate(200), [(0, 1), (5, 1), (10, 1), (15, 1)]),
        (Unpaced(), [(0, 3), (0, 1)]),
    ],
)
async def test_records_are_sent_when_they_are_due(pace: Pace, turns: list[tuple[int, int]]) -> None:
    """Neither before nor after, and all in their order."""
    sleeper = Sleeper()
    sink = KeepingSink(sleeper)
    await replay(sink, pace, sleeper).run()
    assert sink.turns == turns
    assert sink.records == RECORDS


async def test_late_records_are_sent_together_without_delaying_others() -> None:
    """After sending took 15 ms, the next two are due at 10 and 20 ms as before."""
    sleeper = Sleeper()
    sink = KeepingSink(sleeper, takes_ms=[25])
    outcome = await replay(sink, OriginalSpacing(), sleeper).run()
    assert sink.turns == [(0, 1), (25, 2), (30, 1)]
    assert outcome.spacing_max_ms == pytest.approx(25)


async def test_replay_report_counts_sent_records() -> None:
    """Counts, bytes, and the rate that was reached."""
    sleeper = Sleeper()
    outcome = await replay(KeepingSink(sleeper), OriginalSpacing(), sleeper).run()
    assert (outcome.records, outcome.skipped) == (4, 0)
    assert outcome.seconds == pytest.approx(0.03)
    assert outcome.rate_per_s == pytest.approx(4 / 0.03)
    assert outcome.spacing_p50_ms == pytest.approx(0, abs=0.01)


async def test_unpaced_replay_has_no_spacing_error() -> None:
    """A replay that runs as fast as possible cannot be late."""
    sleeper = Sleeper()
    outcome = await replay(KeepingSink(sleeper), Unpaced(), sleeper).run()
    assert (outcome.spacing_p50_ms, outcome.rate_per_s) == (None, 0.0)


async def test_replay_skips_records_already_sent() -> None:
    """They keep their place in the pace, and are counted apart."""
    sleeper = Sleeper()
    sink = KeepingSink(sleeper)
    skip = frozenset(map(identity, RECORDS[1:3]))
    outcome = await replay(sink, OriginalSpacing(), sleeper, skip=skip).run()
    assert sink.turns == [(0, 1), (30, 1)]
    assert (outcome.records, outcome.skipped) == (2, 2)


async def test_unacknowledged_record_ends_replay() -> None:
    """The producer's error comes out of it."""
    sleeper = Sleeper()
    sink = KeepingSink(sleeper)
    sink.failure = LogUnavailable("away")
    with pytest.raises(ExceptionGroup) as caught:
        await replay(sink, OriginalSpacing(), sleeper).run()
    assert caught.group_contains(LogUnavailable)


async def test_empty_recording_sends_nothing() -> None:
    """An empty recording ends well."""
    outcome = await Replay(GivenRecording([]), OriginalSpacing(), KeepingSink(Sleeper())).run()
    assert (outcome.records, outcome.seconds) == (0, 0.0)
