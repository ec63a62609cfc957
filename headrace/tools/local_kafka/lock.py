"""Generation of `jars.lock`: resolves Kafka's dependencies with Maven, once for all users.

`python -m headrace.tools.local_kafka lock` is needed only after changing a version here; all other
users fetch exactly the files of the lock.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from headrace.tools.local_kafka.errors import BrokerUnavailable
from headrace.tools.local_kafka.jars import Jar, format_lock, sha256_of
from headrace.tools.local_kafka.maven import pom, run_maven

KAFKA_VERSION = "4.1.0"
LOG4J_VERSION = "2.25.1"

# The command line tools depend on Kafka Connect and its web server, which are not used here.
_WITHOUT_CONNECT = (
    "org.apache.kafka:connect-api",
    "org.apache.kafka:connect-json",
    "org.apache.kafka:connect-runtime",
    "com.fasterxml.jackson.jakarta.rs:*",
)
_ROOTS = (
    (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", ()),
    (f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}", _WITHOUT_CONNECT),
    (f"org.apache.logging.log4j:log4j-api:{LOG4J_VERSION}", ()),
    (f"org.apache.logging.log4j:log4j-core:{LOG4J_VERSION}", ()),
    (f"org.apache.logging.log4j:log4j-slf4j-impl:{LOG4J_VERSION}", ()),
)


def write_lock(lock_file: Path) -> None:
    """Resolve with Maven and write the lock. Raises `BrokerUnavailable` without `mvn`."""
    maven = shutil.which("mvn")
    if maven is None:
        raise BrokerUnavailable("the lock is written with Maven; there is no mvn on the PATH")
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name) / "repository"
        project = Path(name) / "pom.xml"
        project.write_bytes(pom(_ROOTS))
        run_maven(
            maven,
            project,
            f"-DoutputDirectory={repository}",
            "-DincludeScope=runtime",
            "-Dmdep.useRepositoryLayout=true",
        )
        jars = [_locked(path, repository) for path in repository.rglob("*.jar")]
    lock_file.write_text(format_lock(sorted(jars, key=str)), encoding="ascii")


def _locked(path: Path, repository: Path) -> Jar:
    *group, artifact, version, _ = path.relative_to(repository).parts
    return Jar(".".join(group), artifact, version, path.stat().st_size, sha256_of(path))
