"""Files that are loaded again when they change."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.access.tls import open_certificates
from headrace.access.watched import Watched, read_file
from headrace.config import GatewaySettings
from headrace.errors import ConfigurationError
from headrace.telemetry.file_refresh import refreshing
from headrace.telemetry.logs import Event
from headrace.tools.local_kafka.security import make_certificates
from tests.support.conditions import DEADLINE_S, eventually


def loading(file: Path, reads: list[bytes]) -> Callable[[], bytes]:
    """A loader that notes what it read, and refuses a file that says so."""

    def load() -> bytes:
        content = read_file("keys_file", file)
        reads.append(content)
        if content == b"unusable":
            raise ConfigurationError("unusable")
        if content == b"bug":
            raise RecursionError
        return content

    return load


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_bytes(b"one")
    return found


def test_file_that_stays_is_read_once(file: Path) -> None:
    """A look is enough to see that."""
    reads: list[bytes] = []
    watched = Watched([file], loading(file, reads))

    watched.refresh()

    assert (reads, watched.current()) == ([b"one"], b"one")


def test_change_is_current_only_after_refresh(file: Path) -> None:
    """`current` reads nothing: it is called on the event loop."""
    watched = Watched([file], loading(file, []))

    file.write_bytes(b"second")
    before = watched.current()
    watched.refresh()

    assert (before, watched.current()) == (b"one", b"second")


@pytest.mark.parametrize("content", [b"unusable", b"bug", None], ids=["refused", "bug", "gone"])
def test_file_that_cannot_be_used_leaves_former_content(file: Path, content: bytes | None) -> None:
    """The fault is raised once, not at each look."""
    watched = Watched([file], loading(file, []))
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)

    with pytest.raises(ConfigurationError):
        watched.refresh()

    assert (watched.refresh(), watched.current()) == (False, b"one")


def test_file_is_read_again_until_it_can_be_used(file: Path) -> None:
    """What kept it from being read need not change the file: no file descriptor was left, or its
    mode was set after it was written.
    """
    unreadable: list[str] = []
    load = loading(file, [])

    def load_if_readable() -> bytes:
        if unreadable:
            raise ConfigurationError(unreadable[0])
        return load()

    watched = Watched([file], load_if_readable)
    file.write_bytes(b"second")
    unreadable.append("Too many open files")
    with pytest.raises(ConfigurationError):
        watched.refresh()
    unreadable.clear()

    assert (watched.refresh(), watched.current()) == (True, b"second")


def test_change_while_file_is_read_is_found_by_next_refresh(file: Path) -> None:
    """Else the former content would stay until the next change."""
    reads: list[bytes] = []
    load = loading(file, reads)

    def load_and_change() -> bytes:
        found = load()
        if found == b"one":
            file.write_bytes(b"second")
        return found

    watched = Watched([file], load_and_change)
    watched.refresh()

    assert watched.current() == b"second"


async def test_files_are_refreshed_while_context_lasts(file: Path) -> None:
    """Without a call; one that cannot be used is logged, and ends nothing."""
    watched = Watched([file], loading(file, []))

    def replace(content: bytes) -> None:
        """At once: a file that is being written may be read while it is empty."""
        new = file.with_name("new")
        new.write_bytes(content)
        new.replace(file)

    with capture_logs() as logged:
        async with refreshing([watched], 0.001):
            await asyncio.to_thread(replace, b"unusable")
            await eventually(lambda: bool(logged))
            await asyncio.to_thread(replace, b"second")
            await eventually(lambda: watched.current() == b"second")

    events = [each["event"] for each in logged]
    assert events[:1] == [Event.ACCESS_FILES_REJECTED]


def test_file_that_never_answers_keeps_no_event_loop_from_ending(file: Path) -> None:
    """Such as one on a mount that hangs: the process drains, and ends while it is read."""
    reads: list[bytes] = []
    load = loading(file, reads)
    is_read, answers = threading.Event(), threading.Event()

    def load_slowly() -> bytes:
        if reads:
            is_read.set()
            answers.wait(DEADLINE_S)
        return load()

    watched = Watched([file], load_slowly)
    file.write_bytes(b"second")

    async def refresh_until_read() -> None:
        async with refreshing([watched], 0.001):
            await eventually(is_read.is_set)

    asyncio.run(refresh_until_read())

    assert watched.current() == b"one"
    answers.set()


async def test_files_are_refreshed_again_once_system_has_threads(file: Path) -> None:
    """Else one moment without would keep a certificate in use until it expires."""
    watched = Watched([file], loading(file, []))

    with capture_logs() as logged:
        async with refreshing([watched], 0.001):
            usual = threading.stack_size(1 << 46)  # more than there is
            try:
                await eventually(lambda: bool(logged))
            finally:
                threading.stack_size(usual)
            await asyncio.to_thread(file.write_bytes, b"second")
            await eventually(lambda: watched.current() == b"second")

    assert logged[0]["event"] == Event.ACCESS_FILES_REJECTED


async def test_file_that_never_answers_keeps_no_other_from_refreshing(
    file: Path, tmp_path: Path
) -> None:
    """Such as keys of callers on a mount that hangs, beside certificates that are renewed."""
    is_hanging, answers = threading.Event(), threading.Event()
    hung = tmp_path / "hung"
    hung.write_bytes(b"one")
    reads: list[bytes] = []
    load = loading(hung, reads)

    def load_slowly() -> bytes:
        if reads:
            is_hanging.set()
            answers.wait(DEADLINE_S)
        return load()

    hanging = Watched([hung], load_slowly)
    watched = Watched([file], loading(file, []))

    async with refreshing([hanging, watched], 0.001):
        await asyncio.to_thread(hung.write_bytes, b"second")
        await eventually(is_hanging.is_set)
        await asyncio.to_thread(file.write_bytes, b"second")
        await eventually(lambda: watched.current() == b"second")

    assert hanging.current() == b"one"
    answers.set()


def test_file_of_certificate_and_key_is_read_once(tmp_path: Path) -> None:
    """Through a pipe, whose content comes once for each read: the key belongs to the certificate
    even if both are replaced meanwhile.
    """
    content = make_certificates(tmp_path).broker.read_bytes()
    pipe = tmp_path / "pipe.pem"
    os.mkfifo(pipe)
    loaded = threading.Event()
    reads: list[bytes] = []

    def write() -> None:
        while not reads or not loaded.wait(DEADLINE_S):  # a second reader would wait without end
            with pipe.open("wb") as opened:  # waits for a reader
                opened.write(content)
                reads.append(content)

    writer = threading.Thread(target=write)
    writer.start()
    certificates = open_certificates(GatewaySettings(tls_cert_file=pipe))
    loaded.set()
    writer.join()

    assert certificates is not None
    assert (certificates.current().certificate, reads) == (content, [content])


def test_comments_of_authorities_may_be_in_any_encoding(tmp_path: Path) -> None:
    """Bundles have the names of their authorities there."""
    files = make_certificates(tmp_path)
    authority = files.authority.read_bytes()
    files.authority.write_bytes("# Főtanúsítvány\n".encode() + authority)
    settings = GatewaySettings(tls_cert_file=files.broker, tls_client_ca_file=files.authority)
    certificates = open_certificates(settings)
    assert certificates is not None

    context = certificates.current().context

    assert context.get_ca_certs(binary_form=True) == [ssl.PEM_cert_to_DER_cert(authority.decode())]
