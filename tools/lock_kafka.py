"""Write headrace/tools/local_kafka/jars.lock: resolve Kafka's dependencies with Maven.

    python -m tools.lock_kafka

It is needed only after changing a version here; a local Kafka fetches the files of the lock.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from headrace.tools.local_kafka.installation import LOCK_FILE, Jar, format_lock, sha256_of

KAFKA_VERSION = "4.1.0"
LOG4J_VERSION = "2.25.1"

# The command line tools depend on Kafka Connect and its web server, which are not used here.
_WITHOUT_CONNECT = (
    "org.apache.kafka:connect-api",
    "org.apache.kafka:connect-json",
    "org.apache.kafka:connect-runtime",
    "com.fasterxml.jackson.jakarta.rs:*",
)
_ROOTS: tuple[tuple[str, Sequence[str]], ...] = (
    (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", ()),
    (f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}", _WITHOUT_CONNECT),
    (f"org.apache.logging.log4j:log4j-api:{LOG4J_VERSION}", ()),
    (f"org.apache.logging.log4j:log4j-core:{LOG4J_VERSION}", ()),
    (f"org.apache.logging.log4j:log4j-slf4j-impl:{LOG4J_VERSION}", ()),
)
_COPY_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


def write_lock(lock_file: Path) -> None:
    """Resolve the roots' dependencies with Maven, and write the lock."""
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name) / "repository"
        project = Path(name) / "pom.xml"
        project.write_bytes(_project())
        command = ["mvn", "-B", "-q", "-f", str(project), _COPY_DEPENDENCIES]
        options = ["includeScope=runtime", "mdep.useRepositoryLayout=true"]
        options.append(f"outputDirectory={repository}")
        subprocess.run([*command, *(f"-D{each}" for each in options)], check=True)
        jars = [_lock(path, repository) for path in repository.rglob("*.jar")]
    lock_file.write_text(format_lock(sorted(jars, key=str)), encoding="ascii")


def _project() -> bytes:
    project = ET.Element("project")
    _fill(project, modelVersion="4.0.0", groupId="local", artifactId="kafka", version="1")
    dependencies = ET.SubElement(project, "dependencies")
    for coordinates, exclusions in _ROOTS:
        group, artifact, version = coordinates.split(":")
        dependency = ET.SubElement(dependencies, "dependency")
        _fill(dependency, groupId=group, artifactId=artifact, version=version)
        excluded = ET.SubElement(dependency, "exclusions")
        for exclusion in exclusions:
            group, artifact = exclusion.split(":")
            _fill(ET.SubElement(excluded, "exclusion"), groupId=group, artifactId=artifact)
    return ET.tostring(project)


def _fill(element: ET.Element, **texts: str) -> None:
    for tag, text in texts.items():
        ET.SubElement(element, tag).text = text


def _lock(path: Path, repository: Path) -> Jar:
    *group, artifact, version, _ = path.relative_to(repository).parts
    return Jar(".".join(group), artifact, version, path.stat().st_size, sha256_of(path))


if __name__ == "__main__":
    write_lock(LOCK_FILE)
