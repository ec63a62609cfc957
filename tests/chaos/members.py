"""`headrace run` under a supervisor that starts it again, as an operator's would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from headrace.cli.outcome import Exit
from tests.chaos.history import Fault, FaultKind, History, Skipped
from tests.chaos.shifted_clock import shift_wall_clock
from tests.support.conditions import eventually
from tests.support.forked import ForkedHeadrace
from tests.support.processes import transform_children

READY = '"process.ready"'
CANNOT_BEGIN = ("LogUnavailable", "members of another kind")
"""A process that is started while no broker answers, or before the session of one that was killed
and had another form is over, says so and ends, having done nothing."""
HTTP_PORT = re.compile(r'"http_port": (\d+)')
READY_DEADLINE_S = 180.0
STATUS_DEADLINE_S = 5.0
LOOK_AGAIN_S = 0.25
STOP_DEADLINE_S = 20.0
RESTART_AFTER_S = 0.2
DRAIN_S = 3.0
"""Seconds that a process has to finish the requests in flight after it is told to stop."""
SESSION_TIMEOUT_S = 4.0
AFTERMATH_MS = int(SESSION_TIMEOUT_S * 1000)
"""For so long after a frozen process goes on, or a broker is back, somebody may not know yet that
its partitions are another's: a member learns of it with its next heartbeat, or is expelled.
"""
UNDER_WAY_MS = 1000
"""For so long after a process was killed, or stopped, the broker may write what it had sent."""
TROUBLES = {
    b'"drain.incomplete"': (FaultKind.DRAIN_CUT_SHORT, UNDER_WAY_MS, UNDER_WAY_MS),
    b"not acknowledged within": (
        FaultKind.UNACKNOWLEDGED,
        AFTERMATH_MS + UNDER_WAY_MS,
        AFTERMATH_MS,
    ),
    # On a machine that is short of cores, heartbeats may be missed although nothing struck.
    b"no longer a member of this generation": (
        FaultKind.LOST_PARTITION,
        AFTERMATH_MS + UNDER_WAY_MS,
        UNDER_WAY_MS,
    ),
}
"""Trouble that a process reports: the text, its kind, and how long before and after it has effects.
A send is given up after twice the time-out of a request, and may be written then or later.
"""
SKIPPED = b'"records.skipped"'


def now_ms() -> int:
    """The time that histories are written in: that of records' timestamps."""
    return time.time_ns() // 1_000_000


class Member:
    """One process that is started again whenever it ends unasked.

    Args:
        stages: as on the command line.
        environment: settings, as `HEADRACE_…` variables.
        output: what its lives print goes to `<output>-<life>.log`.
        history: where the faults of this process are written down.

    Attributes:
        crashes: lives that nobody ended, each with its exit code and where its output is.
    """

    def __init__(
        self, stages: str, environment: dict[str, str], output: Path, history: History
    ) -> None:
        self.stages = tuple(stages.split(","))
        self._environment = {
            **{name: value for name, value in os.environ.items() if "HEADRACE" not in name},
            **environment,
            "HEADRACE_TELEMETRY__HTTP_PORT": "0",
        }
        self._clock = output.with_name(f"{output.name}.clock")
        self._clock_shift_ns = 0
        self._shift_clock()
        self._output = output
        self._history = history
        self._process: ForkedHeadrace | None = None
        self._lives = count(1)
        self._log = output
        self._stopping = False
        self._ended_by_us = False
        self._ended = asyncio.Event()
        self.crashes: list[str] = []

    async def run(self) -> None:
        """Keep it running until `stop`; a cancelled one is killed."""
        try:
            while not self._stopping:
                await self._live()
                if not self._stopping:
                    await asyncio.sleep(RESTART_AFTER_S)
        finally:
            self._ended.set()
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _live(self) -> None:
        """Run one life of the process."""
        self._ended_by_us = False
        self._log = self._output.with_name(f"{self._output.name}-{next(self._lives)}.log")
        self._log.touch()
        self._process = ForkedHeadrace(
            ["run", ",".join(self.stages)],
            self._environment,
            self._log,
            prepare=partial(shift_wall_clock, self._clock),
        )
        await self._process.start()
        async with asyncio.TaskGroup() as tasks:
            noting = tasks.create_task(self._note_troubles(), name="note-troubles")
            code = await self._process.wait()
            noting.cancel()
        printed = self._log.read_text(encoding="utf-8", errors="replace")
        self._note_skipped(printed.encode())
        began = READY in printed or not any(reason in printed for reason in CANNOT_BEGIN)
        at_ms = now_ms()
        if code == Exit.NOT_DRAINED:  # it may have said so after the last look
            began_ms, ended_ms = at_ms - UNDER_WAY_MS, at_ms + UNDER_WAY_MS
            self._history.add(Fault(began_ms, ended_ms, FaultKind.DRAIN_CUT_SHORT, self.stages))
        if self._ended_by_us or not began:
            return
        self._history.add(Fault(at_ms, at_ms + UNDER_WAY_MS, FaultKind.CRASHED, self.stages))
        self.crashes.append(f"{','.join(self.stages)} ended with {code}: see {self._log}")

    async def _note_troubles(self) -> None:
        """Write down when this life says what can leave it unknown whether answers were written,
        or leave them uncommitted.
        """
        known = dict.fromkeys(TROUBLES, 0)
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            printed = self._log.read_bytes()
            self._note_skipped(printed)
            for said, (kind, before_ms, after_ms) in TROUBLES.items():
                found = printed.count(said)
                if found > known[said]:
                    known[said], at_ms = found, now_ms()
                    self._history.add(Fault(at_ms - before_ms, at_ms + after_ms, kind, self.stages))

    def _note_skipped(self, printed: bytes) -> None:
        """Write down which requests ingest says were deleted before it read them."""
        if "ingest" not in self.stages:
            return
        for line in printed.split(b"\n")[:-1]:
            if SKIPPED not in line:
                continue
            said = json.loads(line)
            partition = int(said["partition"].rpartition("/")[2])
            end = said["first"] + said["count"]
            skipped = Skipped(now_ms(), partition, said["first"], end)
            if all(each[1:] != skipped[1:] for each in self._history.skipped):
                self._history.add(skipped)

    async def save_status(self) -> None:
        """Keep what `/status` says beside the log, for whoever asks why nothing goes on."""
        text = await self._read_status()
        if text:
            self._log.with_suffix(".status.json").write_text(text, encoding="utf-8")

    async def status(self) -> dict[str, Any]:
        """Return the content of `/status`, or an empty object if the process does not answer."""
        try:
            found: dict[str, Any] = json.loads(await self._read_status())
        except ValueError:
            return {}
        return found

    async def _read_status(self) -> str:
        found = HTTP_PORT.search(self._log.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            return ""
        url = f"http://127.0.0.1:{found[1]}/status"
        limit = aiohttp.ClientTimeout(STATUS_DEADLINE_S)
        try:
            async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"no answer: {error!r}"

    def transform_children(self) -> list[int]:
        """Return its child processes that transform payloads now."""
        process = self._process
        if process is None or process.returncode is not None:
            return []
        return transform_children(process.pid)

    @property
    def is_ready(self) -> bool:
        """Whether this life has said so."""
        process = self._process
        return (
            process is not None
            and process.returncode is None
            and READY in self._log.read_text(encoding="utf-8", errors="replace")
        )

    async def wait_ready(self) -> None:
        """Wait until the process serves."""
        await eventually(
            lambda: self.is_ready,
            deadline_s=READY_DEADLINE_S,
            what=f"{self._log} to say {READY}",
            recheck_s=0.05,
        )

    async def kill(self) -> None:
        """Kill the process as a crash would (SIGKILL); the supervisor starts the next life."""
        began_ms = now_ms()
        if self._process is not None and self._process.returncode is None:
            await self._end(signal.SIGKILL)
            ended_ms = now_ms() + UNDER_WAY_MS
            self._history.add(Fault(began_ms, ended_ms, FaultKind.KILLED, self.stages))

    async def redeploy(self) -> None:
        """Ask it to end (SIGTERM); the supervisor starts the next life."""
        began_ms = now_ms()
        await self._end(signal.SIGTERM)
        self._history.add(Fault(began_ms, now_ms(), FaultKind.REDEPLOYED, self.stages))

    def freeze(self) -> None:
        """Hold it (SIGSTOP): it notices nothing, and is not noticed to be gone for a while."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on (SIGCONT), unaware of what happened meanwhile."""
        self._send(signal.SIGCONT)

    def set_clock_back(self, by_s: float) -> None:
        """Set its wall clock back, and that of its later lives: they run on the same machine."""
        began_ms = now_ms()
        self._clock_shift_ns -= int(by_s * 1e9)
        self._shift_clock()
        self._history.add(Fault(began_ms, now_ms(), FaultKind.CLOCK_SET_BACK, self.stages))

    def _shift_clock(self) -> None:
        # Never truncated: the process has it mapped.
        file = os.open(self._clock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, self._clock_shift_ns.to_bytes(8, "little", signed=True), 0)
        finally:
            os.close(file)

    async def stop(self) -> None:
        """End it for good, cleanly."""
        self._stopping = True
        await self._end(signal.SIGTERM)
        async with asyncio.timeout(STOP_DEADLINE_S):
            await self._ended.wait()

    def _send(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def _end(self, number: signal.Signals) -> None:
        process = self._process
        self._ended_by_us = True
        self._send(number)
        if process is None:
            return
        began_ms = now_ms()
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await process.wait()
            if now_ms() - began_ms >= DRAIN_S * 1000:
                ended_ms = now_ms() + UNDER_WAY_MS
                cut = Fault(began_ms, ended_ms, FaultKind.DRAIN_CUT_SHORT, self.stages)
                self._history.add(cut)
        except TimeoutError:
            self.crashes.append(f"{','.join(self.stages)} did not end: see {self._log}")
            process.kill()
