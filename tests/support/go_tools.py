"""Programs of others that tests run, built from the Go modules in `tools/`.

Each folder there holds a `go.mod` whose `tool` line names the program and whose `require` lines
and `go.sum` pin everything that goes into it, and some have a program of their own, which does
less than the one of the module that it calls. `make test-tools` builds them, which takes minutes
once; a built one stays in the user's cache under its version. Tests of one that is not there are
skipped, with the reason.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.tree import ROOT

FIXTURES = {
    "ghz": "tools/ghz",
    "grpcurl": "tools/grpcurl",
    "jaeger_program": "tools/jaeger",
    "promtool": "tools/promtool",
    "versitygw_program": "tools/versitygw",
}
"""Each fixture that is a program, and the folder of its module."""

BUILD_TIMEOUT_S = 1800


class NotBuilt(Exception):
    """A tool cannot be had on this machine; the message says why."""


class GoTool(NamedTuple):
    """A tool as a module's `go.mod` names it."""

    folder: Path
    package: str
    version: str

    @property
    def program(self) -> Path:
        """Path of the program, once it is built."""
        configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache = configured if configured.is_absolute() else Path.home() / ".cache"
        return cache / "headrace" / f"{self.folder.name}-{self.version}"


def read_tool(folder: Path) -> GoTool:
    """The tool of a module: its package, and the version of the module that has the package.

    That of a program in the folder itself is the version of the module that it calls, and a
    checksum of its text.
    """
    text = (folder / "go.mod").read_text(encoding="utf-8")
    (package,) = re.findall(r"^tool (\S+)$", text, flags=re.MULTILINE)
    if (folder / "main.go").exists():
        (version,) = re.findall(r"^require \S+ v(\S+)$", text, flags=re.MULTILINE)
        checksum = zlib.crc32((folder / "main.go").read_bytes())
        return GoTool(folder, package, f"{version}-{checksum:08x}")
    versions = dict(re.findall(r"^\t(\S+) v(\S+)", text, flags=re.MULTILINE))
    module = next(
        str(parent) for parent in Path(package).parents if versions.get(str(parent)) is not None
    )
    return GoTool(folder, package, versions[module])


def build(tool: GoTool) -> Path:
    """The program, built now unless it was built before; takes minutes the first time.

    Raises:
        NotBuilt: there is no Go, or it could not fetch or compile the modules.
    """
    if tool.program.exists():
        return tool.program
    go = shutil.which("go")
    if go is None:
        raise NotBuilt(f"no Go on this machine to build {tool.package}")
    tool.program.parent.mkdir(parents=True, exist_ok=True)
    with tool.program.with_suffix(".lock").open("w") as lock:
        # One process builds and the others wait: a build takes minutes and gigabytes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return tool.program if tool.program.exists() else _build(tool, go)


def _build(tool: GoTool, go: str) -> Path:
    part = tool.program.with_suffix(f".{os.getpid()}.part")
    # Two packages at a time: more of them take gigabytes. The tags leave Prometheus' service
    # discovery out but for DNS, with the clients of twenty clouds, which are most of promtool.
    options = ["-p", "2", "-tags", "remove_all_sd,enable_dns_sd", "-ldflags=-s -w"]
    command = [go, "build", *options, "-o", str(part), tool.package]
    built = subprocess.run(
        command,
        check=False,
        cwd=tool.folder,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    if built.returncode:
        raise NotBuilt(f"{' '.join(command)}, in {tool.folder.name}: {built.stderr[-1000:]}")
    part.replace(tool.program)
    return tool.program


def built(name: str) -> Path:
    """Return the program of a fixture; the test is skipped if it was not built."""
    tool = read_tool(ROOT / FIXTURES[name])
    if not tool.program.exists():
        pytest.skip(f"{tool.folder.name} {tool.version} is not built: run `make test-tools`")
    return tool.program


@pytest.fixture(scope="session")
def promtool() -> Path:
    """Prometheus' own tool for its configuration, rules and metrics."""
    return built("promtool")


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    """A client for any gRPC server that describes itself."""
    return built("grpcurl")


@pytest.fixture(scope="session")
def ghz() -> Path:
    """A load generator for gRPC."""
    return built("ghz")


@pytest.fixture(scope="session")
def jaeger_program() -> Path:
    """Jaeger, all of it in one program: OTLP in, its query API out."""
    return built("jaeger_program")


@pytest.fixture(scope="session")
def versitygw_program() -> Path:
    """S3 over a directory; see `tests.support.versitygw`."""
    return built("versitygw_program")


def main() -> None:
    """Build all tools, one after the other, and say of each where it is or why it is not."""
    for folder in FIXTURES.values():
        tool = read_tool(ROOT / folder)
        sys.stdout.write(f"{tool.folder.name} {tool.version}: ")
        sys.stdout.flush()
        try:
            sys.stdout.write(f"{build(tool)}\n")
        except NotBuilt as reason:
            sys.stdout.write(f"not built, its tests are skipped: {reason}\n")


if __name__ == "__main__":
    main()
