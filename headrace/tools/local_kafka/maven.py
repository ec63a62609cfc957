"""Ways to fetch jars: a configured repository, Maven (`mvn`), or the Python package jgo.

None of them resolves dependencies: each fetches exactly the files of the lock. Maven and jgo use
Maven Central by default, and Maven uses the mirrors in the user's `settings.xml`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

from headrace.tools.local_kafka.errors import BrokerUnavailable
from headrace.tools.local_kafka.jars import Fetch, Jar

REPOSITORY_VARIABLE = "HEADRACE_MAVEN_REPOSITORY"
HOW_TO_FETCH = (
    "install Maven (the command mvn), or the Python package jgo "
    "(pip install 'headrace[local-kafka]'), "
    f"or set {REPOSITORY_VARIABLE} to the URL of a Maven repository"
)
_COPY_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_MAVEN_TIMEOUT_S = 600.0
_DOWNLOAD_TIMEOUT_S = 60.0


def fetch_jars(jars: Sequence[Jar], into: Path) -> None:
    """Put `jars` into the folder `into`, by the first way that works.

    Raises:
        BrokerUnavailable: with the error of each way, and what to do.
    """
    ways = _ways()
    if not ways:
        raise BrokerUnavailable(f"there is nothing here to fetch Kafka with: {HOW_TO_FETCH}")
    faults = []
    for name, fetch in ways:
        try:
            fetch(jars, into)
        except BrokerUnavailable as error:
            faults.append(f"{name}: {error}")
        else:
            return
    raise BrokerUnavailable(f"Kafka could not be fetched: {'; '.join(faults)}. {HOW_TO_FETCH}")


def _ways() -> list[tuple[str, Fetch]]:
    repository = os.environ.get(REPOSITORY_VARIABLE)
    if repository:
        # If a repository is configured, no other is used.
        return [(REPOSITORY_VARIABLE, partial(fetch_from_repository, repository))]
    ways: list[tuple[str, Fetch]] = []
    maven = shutil.which("mvn")
    if maven is not None:
        ways.append(("mvn", partial(fetch_with_maven, maven)))
    if importlib.util.find_spec("jgo") is not None:
        ways.append(("jgo", fetch_with_jgo))
    return ways


def fetch_from_repository(url: str, jars: Sequence[Jar], into: Path) -> None:
    """Fetch from a Maven repository by its URL (`https:`, `http:` or `file:`)."""
    if not url.startswith(("https://", "http://", "file://")):
        raise BrokerUnavailable(f"expected a URL with https, http or file, got {url!r}")
    for jar in jars:
        address = f"{url.rstrip('/')}/{jar.repository_path}"
        try:
            with (
                urllib.request.urlopen(  # noqa: S310 - the scheme is checked above
                    address, timeout=_DOWNLOAD_TIMEOUT_S
                ) as response,
                (into / jar.file_name).open("wb") as file,
            ):
                shutil.copyfileobj(response, file)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise BrokerUnavailable(f"{address}: {error}") from error


def fetch_with_maven(maven: str, jars: Sequence[Jar], into: Path) -> None:
    """Let Maven copy the jars of a project that depends on exactly these."""
    pom = into / "pom.xml"
    pom.write_bytes(pom_of_exactly(jars))
    run_maven(maven, pom, f"-DoutputDirectory={into}")


def run_maven(maven: str, pom: Path, *properties: str) -> None:
    """Copy a project's dependencies. Raises `BrokerUnavailable` with what Maven said."""
    command = [maven, "-B", "-q", "-f", str(pom), _COPY_DEPENDENCIES, *properties]
    try:
        subprocess.run(  # noqa: S603 - every argument is ours; no shell reads them
            command, check=True, capture_output=True, text=True, timeout=_MAVEN_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise BrokerUnavailable(f"exit status {error.returncode}: {error.stdout[-500:]}") from error
    except (subprocess.TimeoutExpired, OSError) as error:
        raise BrokerUnavailable(str(error)) from error


def pom_of_exactly(jars: Sequence[Jar]) -> bytes:
    """Return a Maven project that depends on `jars`, without their own dependencies."""
    dependencies = [(f"{jar.group}:{jar.artifact}:{jar.version}", ("*:*",)) for jar in jars]
    return pom(dependencies)


def pom(dependencies: Sequence[tuple[str, Sequence[str]]]) -> bytes:
    """Return a Maven project.

    Args:
        dependencies: `group:artifact:version` of each, with the `group:artifact` patterns that are
            excluded from its own dependencies.
    """
    project = ET.Element("project")
    _fill(project, modelVersion="4.0.0", groupId="local", artifactId="kafka", version="1")
    listed = ET.SubElement(project, "dependencies")
    for coordinates, exclusions in dependencies:
        group, artifact, version = coordinates.split(":")
        dependency = ET.SubElement(listed, "dependency")
        _fill(dependency, groupId=group, artifactId=artifact, version=version)
        excluded = ET.SubElement(dependency, "exclusions")
        for exclusion in exclusions:
            group, artifact = exclusion.split(":")
            _fill(ET.SubElement(excluded, "exclusion"), groupId=group, artifactId=artifact)
    return ET.tostring(project)


def _fill(element: ET.Element, **texts: str) -> None:
    for tag, text in texts.items():
        ET.SubElement(element, tag).text = text


def fetch_with_jgo(jars: Sequence[Jar], into: Path) -> None:
    """Let jgo download the jars: it is a Maven client written in Python, and needs no Java."""
    from jgo.maven import MavenContext, PythonResolver

    context = MavenContext(
        resolver=PythonResolver(),
        repo_cache=into / "repository",
        local_repos=[],
        timeout=int(_DOWNLOAD_TIMEOUT_S),
    )
    for jar in jars:
        component = context.project(jar.group, jar.artifact).at_version(jar.version)
        try:
            path = component.artifact(packaging="jar").resolve()
        except (RuntimeError, OSError) as error:
            raise BrokerUnavailable(f"{jar}: {error}") from error
        path.replace(into / jar.file_name)
