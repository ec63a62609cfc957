"""Opening of topics and files as recordings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.errors import ConfigurationError
from headrace.log.port import Log
from headrace.tools.replay.capture_recording import open_capture
from headrace.tools.replay.recording import Recording
from headrace.tools.replay.selection import Selection
from headrace.tools.replay.topic_recording import open_topic


@asynccontextmanager
async def open_recording(
    log: Log | None, source: str | Path, selection: Selection
) -> AsyncIterator[Recording]:
    """Open a topic (a `str`, its name) or a capture file (a `Path`) as a recording.

    The log must be open; a file needs none.

    Raises:
        ConfigurationError: the topic or file is missing, or is not a capture file of this version.
        CaptureFault: the file's index is damaged.
        LogUnavailable: no broker answers.
    """
    if isinstance(source, Path):
        async with open_capture(source, selection) as capture:
            yield capture
        return
    if log is None:
        raise ConfigurationError(f"{source}: a topic is read from a log, and none is open")
    async with open_topic(log, source, selection) as recording:
        yield recording
