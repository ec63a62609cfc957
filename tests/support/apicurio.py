"""A real schema registry: Apicurio, in memory, on a port of its own, on the Java of the broker."""

from __future__ import annotations

import asyncio
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Self

import aiohttp

from headrace.tools.local_kafka.broker import free_port
from headrace.tools.local_kafka.installation import (
    Jar,
    cache_directory,
    ensure_jars,
    fetch_jars,
    find_java,
    read_lock,
)
from tests.support.conditions import eventually

HOST = "127.0.0.1"
START_DEADLINE_S = 60.0
AVRO = Jar(
    "org.apache.avro",
    "avro",
    "1.12.0",
    713436,
    "1f5fbfff9b7427d6832cc3031a3c81413d3e21d9e2551847d9231c28493f9492",
)
"""Avro for Java; what it needs besides is among Kafka's jars."""
SERDES = tuple(
    Jar("io.apicurio", f"apicurio-{artifact}", version, size_bytes, sha256)
    for artifact, version, size_bytes, sha256 in (
        (
            "common-rest-client-common",
            "0.1.18.Final",
            31330,
            "7e73da0b5bd1cff35ff24f2172d41b79ef55362dbbd6104c5d5108ffed87dcd7",
        ),
        (
            "common-rest-client-jdk",
            "0.1.18.Final",
            12651,
            "ef1feac9226e31722444f608ad5d998e0d0753ed886a6decad19effe23d9b734",
        ),
        (
            "registry-client",
            "2.6.13.Final",
            117249,
            "3b06edde267fbf98207fcab297679b25475d62f4b31aa54612eb0e44f1804ad2",
        ),
        (
            "registry-common",
            "2.6.13.Final",
            268299,
            "1f08d5cfdf183be38f53df9e4ed72cb11f7923405ba7f2b3043f334fe6c732df",
        ),
        (
            "registry-schema-resolver",
            "2.6.13.Final",
            50484,
            "171a974f39df803e0084c962b80b58a2e40645cb08e8297bdbbe34c2ef61a3c1",
        ),
        (
            "registry-serde-common",
            "2.6.13.Final",
            57763,
            "5f5e0e834699516be7b39ee6cdefa138a417758bbf66e28950158a7232014e76",
        ),
        (
            "registry-serdes-avro-serde",
            "2.6.13.Final",
            30798,
            "71e2a474b6ef82b94d161eed801bc6570a31b324e6872e7c19e09c3b10bc3ad1",
        ),
    )
)
"""Apicurio's serializers for Java, which can write and read Confluent's framing."""


class Archive(Jar):
    """An archive with a program and its jars."""

    @property
    def file_name(self) -> str:
        """Name of the file in the repository."""
        return f"{self.artifact}-{self.version}-all.tar.gz"


APICURIO = Archive(
    "io.apicurio",
    "apicurio-registry-app",
    "2.6.13.Final",
    142198683,
    "3cda1b34aa020fb4ac4dd6a66018d757e81e437f97e20a1f92d366b70091c6ba",
)


def _directory() -> Path:
    return cache_directory(read_lock()).parent / f"apicurio-{APICURIO.version}"


def install_avro() -> Path:
    """Fetch Avro for Java, unless that was done before."""
    (path,) = ensure_jars([AVRO], _directory(), fetch_jars)
    return path


def install_serdes() -> tuple[Path, ...]:
    """Fetch the serializers and Avro for Java, unless that was done before."""
    return ensure_jars([AVRO, *SERDES], _directory(), fetch_jars)


def install_apicurio() -> Path:
    """Fetch the registry, unless that was done before; return its program."""
    directory = _directory()
    (archive,) = ensure_jars([APICURIO], directory, fetch_jars)
    program = directory / "program"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=directory) as name:
            with tarfile.open(archive) as files:
                files.extractall(name, filter="data")
            # At once, as several processes may do this.
            try:
                Path(name).rename(program)
            except OSError:
                assert program.exists()
            else:
                Path(name).mkdir()
    (found,) = program.glob("*-runner.jar")
    return found


class Apicurio:
    """Entered when it answers; left when it has ended.

    Attributes:
        url: where it speaks Confluent's protocol.
        own_url: where it speaks its own, as its serializers do.
    """

    def __init__(self, program: Path) -> None:
        port = free_port([], HOST)
        self.url = f"http://{HOST}:{port}/apis/ccompat/v7"
        self.own_url = f"http://{HOST}:{port}/apis/registry/v2"
        self._command = [
            str(find_java()),
            # A short life: little to compile, and little memory.
            *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"),
            *(f"-Dquarkus.http.host={HOST}", f"-Dquarkus.http.port={port}"),
            *("-jar", str(program)),
        ]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __aexit__
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )
        await eventually(
            self._answers, deadline_s=START_DEADLINE_S, recheck_s=0.1, what="Apicurio answers"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()  # it has nothing to save
        await self._process.wait()
        self._output.close()

    async def _answers(self) -> bool:
        assert self._process.returncode is None, f"Apicurio ended: {self._process.returncode}"
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self.url}/subjects") as response,
            ):
                return response.status == 200
        except aiohttp.ClientError:
            return False
