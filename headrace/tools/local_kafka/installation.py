"""Java and Kafka's jars, which a broker is run from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.tools.local_kafka.jars import cache_directory, ensure_jars, read_lock
from headrace.tools.local_kafka.java import find_java
from headrace.tools.local_kafka.maven import fetch_jars


@dataclass(frozen=True, slots=True)
class Installation:
    """A `java` command and the jars of its class path."""

    java: Path
    jars: tuple[Path, ...]

    def command(self, main_class: str, *arguments: str, jvm: tuple[str, ...] = ()) -> list[str]:
        """Return the command line that runs a class of Kafka."""
        class_path = os.pathsep.join(str(jar) for jar in self.jars)
        return [str(self.java), *jvm, "-cp", class_path, main_class, *arguments]


def install() -> Installation:
    """Find a Java, and fetch Kafka (45 MB) unless this user's cache has it. Blocks.

    Raises:
        BrokerUnavailable: one of them is not available; the message says what to do.
        ChecksumMismatch: a fetched file differs from the one in the lock.
    """
    java = find_java()
    jars = read_lock()
    return Installation(java, ensure_jars(jars, cache_directory(jars), fetch_jars))
