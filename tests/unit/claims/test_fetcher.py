"""Fetching objects from stores over HTTP, from S3 and from directories."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from headrace.claims.fetcher import ClaimFetcher
from headrace.claims.putter import ClaimPutter
from headrace.claims.stores import ClaimUnavailable
from headrace.config import ClaimSettings
from headrace.errors import ConfigurationError, Rejected
from headrace.primitives.backoff import Backoff
from headrace.protocol.claims import describe_claim, write_claim
from headrace.tuning import ClaimTuning
from tests.support.claim_store import StandInStore
from tests.support.cloud_buckets import AzureContainer
from tests.support.conditions import eventually

QUICK = ClaimTuning(backoff=Backoff(0.001, 0.01), chunk_bytes=4096)
CONTENT = Random(7).randbytes(99_999) + b"."


async def fetched(header: bytes, allowed: str, **settings: int) -> bytes:
    """The object of a claim."""
    given = ClaimSettings.model_validate({"allowed": [allowed], **settings})
    async with ClaimFetcher(given, QUICK) as fetcher:
        return await fetcher.fetch(fetcher.read_claim(header))


def use_s3(monkeypatch: pytest.MonkeyPatch, store: StandInStore) -> None:
    """Let the store be S3, by the variables that the library reads."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def files_in(directory: Path) -> list[str]:
    """The names of all files, however deep."""
    return [each.name for each in directory.rglob("*") if each.is_file()]


async def test_object_is_fetched_over_http() -> None:
    """Its bytes are those that were put there, and they are counted."""
    counts = Counter[str]()

    def count(outcome: str, size_bytes: int, _: float) -> None:
        counts[outcome] += size_bytes

    async with StandInStore() as store:
        header = store.put("/in/a", CONTENT)
        async with ClaimFetcher(ClaimSettings(allowed=(store.url,)), QUICK, count) as fetcher:
            assert await fetcher.fetch(fetcher.read_claim(header)) == CONTENT

    assert counts == {"ok": len(CONTENT)}


async def test_object_is_fetched_from_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes the address and the login from the environment."""
    async with StandInStore() as store:
        use_s3(monkeypatch, store)
        store.objects["/bucket/in/a b"] = CONTENT
        header = write_claim(describe_claim("s3://bucket/in/a%20b", CONTENT))
        assert await fetched(header, "s3://bucket/in") == CONTENT

        missing = write_claim(describe_claim("s3://bucket/in/other", CONTENT))
        with pytest.raises(Rejected, match="expected an object at s3://bucket, got none"):
            await fetched(missing, "s3://bucket/in")
        store.failures_left = 2
        assert await fetched(header, "s3://bucket/in") == CONTENT


@pytest.mark.parametrize(
    "failure", [(401, "AuthenticationRequired"), (403, "InvalidAccessKeyId"), (400, "ExpiredToken")]
)
async def test_login_that_store_refuses_is_no_fault_of_claim(
    monkeypatch: pytest.MonkeyPatch, failure: tuple[int, str]
) -> None:
    """The object is fetched when the login is good again; until then the error says what came."""
    status, code = failure
    async with StandInStore() as store:
        use_s3(monkeypatch, store)
        store.objects["/bucket/a"] = CONTENT
        store.failure, store.failures_left = failure, 1_000_000
        header = write_claim(describe_claim("s3://bucket/a", CONTENT))
        with pytest.raises(ClaimUnavailable, match=rf"s3://bucket: \w+ \({status} {code}\)$"):
            await fetched(header, "s3://bucket", timeout_ms=200)
        store.failures_left = 2
        assert await fetched(header, "s3://bucket") == CONTENT


async def test_object_that_login_may_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers so for an object that is not there, too, where nobody may list the bucket."""
    async with StandInStore() as store:
        use_s3(monkeypatch, store)
        store.failure, store.failures_left = (403, "AccessDenied"), 1
        header = write_claim(describe_claim("s3://bucket/a", CONTENT))
        with pytest.raises(Rejected, match=r"got PermissionDeniedError \(403 AccessDenied\)$"):
            await fetched(header, "s3://bucket")


def test_missing_package_is_refused_with_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only object stores need it."""
    monkeypatch.setitem(sys.modules, "obstore.store", None)

    ClaimFetcher(ClaimSettings(allowed=("https://files.example/in", "file:///in")))
    expected = r"claims.allowed: s3://bucket needs the package obstore: .*'headrace\[claims\]'"
    with pytest.raises(ConfigurationError, match=expected):
        ClaimFetcher(ClaimSettings(allowed=("s3://bucket/in",)))


async def test_object_is_fetched_from_directory(tmp_path: Path) -> None:
    """Below the allowed one, however deep."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a").write_bytes(CONTENT)
    header = write_claim(describe_claim(f"file://{tmp_path}/in/deep/a", CONTENT))

    assert await fetched(header, f"file://{tmp_path}/in") == CONTENT


@pytest.mark.parametrize("kind", ["link", "link in path", "fifo", "directory", "missing", "long"])
async def test_directory_gives_nothing_but_its_files(tmp_path: Path, kind: str) -> None:
    """A link may lead anywhere, so none is followed."""
    root, outside = tmp_path / "in", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "a").write_bytes(CONTENT)
    name = {"link in path": "sub/a", "long": "a" * 300}.get(kind, "a")
    if kind == "link":
        (root / "a").symlink_to(outside / "a")
    elif kind == "link in path":
        (root / "sub").symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(root / "a")
    elif kind == "directory":
        (root / "a").mkdir()
    header = write_claim(describe_claim(f"file://{root}/{name}", CONTENT))

    with pytest.raises(Rejected, match="header x-claim: expected") as raised:
        await fetched(header, f"file://{root}")
    assert raised.value.code == "INVALID_REQUEST"


async def test_directory_that_is_away_is_unavailable(tmp_path: Path) -> None:
    """It may be a mount that comes back, so the request must not be a dead letter."""
    header = write_claim(describe_claim(f"file://{tmp_path}/in/a", CONTENT))
    settings = ClaimSettings(allowed=(f"file://{tmp_path}/in",), timeout_ms=50)

    async with ClaimFetcher(settings, QUICK) as fetcher:
        with pytest.raises(ClaimUnavailable, match="got file://: FileNotFoundError"):
            await fetcher.fetch(fetcher.read_claim(header))


@pytest.mark.parametrize(
    "url", ["{evil}/in/a", "{store}/other/a", "{store}/in/../other/a", "file:///etc/passwd"]
)
async def test_object_that_is_not_allowed_is_never_fetched(url: str) -> None:
    """The error names the host, and nothing of the path."""
    async with StandInStore() as store, StandInStore() as evil:
        evil.put("/in/a", CONTENT)
        store.put("/other/a", CONTENT)
        digest = describe_claim("s3://any", CONTENT).sha256
        header = f"{url.format(store=store.url, evil=evil.url)} {len(CONTENT)} {digest}".encode()
        with pytest.raises(Rejected, match="header x-claim: expected") as raised:
            await fetched(header, f"{store.url}/in")

    assert raised.value.code == "INVALID_REQUEST"
    assert "other/a" not in raised.value.message
    assert "passwd" not in raised.value.message
    if "{evil}" in url:
        assert evil.url in raised.value.message
    assert not store.requests + evil.requests


async def test_redirect_is_not_followed() -> None:
    """Its target may be a host that is not allowed."""
    async with StandInStore() as store, StandInStore() as evil:
        evil.put("/a", CONTENT)
        header = store.put("/a", CONTENT)
        store.redirects["/a"] = f"{evil.url}/a"
        with pytest.raises(Rejected, match=r"got a redirect \(307\)"):
            await fetched(header, store.url)

    assert not evil.requests


@pytest.mark.parametrize("stored", [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x"])
@pytest.mark.parametrize("length", ["told", "untold"])
async def test_another_object_is_refused(stored: bytes, length: str) -> None:
    """An object of another size or digest is refused; bytes beyond the size are not read."""
    async with StandInStore() as store:
        header = store.put("/a", CONTENT)
        store.objects["/a"] = stored
        if length == "untold":
            store.lengths["/a"] = None
        with pytest.raises(Rejected, match=r"header x-claim: expected an object .*, got") as raised:
            await fetched(header, store.url)

    assert raised.value.code == "INVALID_REQUEST"
    if len(stored) == len(CONTENT):
        assert "SHA-256" in raised.value.message


async def test_endless_object_is_read_up_to_its_size() -> None:
    """A store that sends more is cut off: memory is that of the claim."""
    async with StandInStore() as store:
        header = store.put("/a", CONTENT[:1000])
        store.objects["/a"] = bytes(50_000_000)
        store.lengths["/a"] = None
        with pytest.raises(Rejected, match="expected an object of 1000 bytes, got more"):
            await fetched(header, store.url)

    assert store.sent_bytes < 25_000_000


async def test_claim_of_large_object_is_refused_unfetched() -> None:
    """The size that the claim names is enough to refuse it."""
    async with StandInStore() as store:
        header = store.put("/a", CONTENT)
        with pytest.raises(Rejected, match="expected at most 50000 bytes, got 100000") as raised:
            await fetched(header, store.url, max_bytes=50_000)

    assert raised.value.code == "TOO_LARGE"
    assert not store.requests


async def test_failing_store_is_asked_again() -> None:
    """A store that fails, or breaks off an answer, is asked again."""
    async with StandInStore() as store, asyncio.TaskGroup() as tasks:
        header = store.put("/a", CONTENT)
        store.failures_left = 3
        store.cut.add("/a")
        fetching = tasks.create_task(fetched(header, store.url))
        await eventually(lambda: len(store.requests) > 6, what="it is asked after it broke off")
        store.cut.clear()
        assert await fetching == CONTENT


async def test_store_is_asked_again_when_it_wants_to_be() -> None:
    """Its `Retry-After` is longer than the pause that would be made without it."""
    async with StandInStore() as store:
        header = store.put("/a", CONTENT)
        store.failures_left, store.failure_headers = 1, {"Retry-After": "1"}
        began_s = asyncio.get_running_loop().time()
        assert await fetched(header, store.url) == CONTENT
        assert asyncio.get_running_loop().time() - began_s >= 1.0


async def test_store_that_is_unavailable_is_given_up_after_timeout() -> None:
    """Whether it refuses connections or sends nothing; the error is retriable."""
    async with StandInStore() as store:
        header = store.put("/a", CONTENT)
        store.holds = True
        with pytest.raises(ClaimUnavailable, match=r"within 0.05 s \(claims.timeout_ms\)"):
            await fetched(header, store.url, timeout_ms=50)
    with pytest.raises(ClaimUnavailable, match=f"got {store.url}: ClientConnectorError"):
        await fetched(header, store.url, timeout_ms=500)


@pytest.mark.parametrize("place", ["http", "s3", "file"])
async def test_object_that_was_put_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Its place follows from its content, so a repeated put changes nothing."""
    async with StandInStore() as store:
        use_s3(monkeypatch, store)
        prefix = {"http": f"{store.url}/out", "s3": "s3://bucket", "file": f"file://{tmp_path}/out"}
        settings = ClaimSettings(allowed=(prefix[place],))
        async with ClaimPutter(prefix[place], settings, "here", QUICK) as putter:
            claim = putter.describe("topic/0/1", CONTENT)
            store.failures_left = 2
            await putter.put(claim, CONTENT, "image/png", 123)
            await putter.put(claim, CONTENT, "image/png", 123)
        assert await fetched(write_claim(claim), prefix[place]) == CONTENT

    assert claim.address.url == f"{prefix[place]}/topic/0/1/{claim.sha256}"
    if place == "file":
        assert files_in(tmp_path) == [claim.sha256]
    else:
        (headers,) = store.attributes.values()
        assert headers["Content-Type"] == "image/png"
        prefixed = "x-amz-meta-" if place == "s3" else ""
        assert headers[f"{prefixed}headrace-expires-ms"] == "123"


async def test_object_in_azure_has_its_time_by_name_that_azure_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name with hyphens is `InvalidMetadata` there, and the object is not written."""
    async with AzureContainer() as container:
        for name, value in container.environment.items():
            monkeypatch.setenv(name, value)
        prefix = "az://models/out"
        async with ClaimPutter(prefix, ClaimSettings(timeout_ms=500), "here", QUICK) as putter:
            await putter.put(putter.describe("a", CONTENT), CONTENT, "image/png", 123)

    assert list(container.objects.values()) == [CONTENT]
    assert container.metadata == {"headrace_expires_ms": "123"}


async def test_objects_are_fetched_concurrently_up_to_limit() -> None:
    """The others wait for a slot."""
    async with StandInStore() as store:
        headers = [store.put(f"/{number}", CONTENT) for number in range(10)]
        store.holds = True
        settings = ClaimSettings(allowed=(store.url,), concurrency=4)
        async with ClaimFetcher(settings, QUICK) as fetcher, asyncio.TaskGroup() as tasks:
            fetches = [
                tasks.create_task(fetcher.fetch(fetcher.read_claim(header))) for header in headers
            ]
            await eventually(lambda: store.reads == 4, what="four are read")
            store.held.set()
        assert [each.result() for each in fetches] == [CONTENT] * 10

    assert store.most_reads == 4


async def test_store_that_hangs_takes_no_slot_of_another() -> None:
    """Each store has its own."""
    async with StandInStore() as slow, StandInStore() as store:
        settings = ClaimSettings(allowed=(slow.url, store.url), concurrency=1)
        stuck, header = slow.put("/a", CONTENT), store.put("/a", CONTENT)
        slow.holds = True
        async with ClaimFetcher(settings, QUICK) as fetcher, asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(fetcher.fetch(fetcher.read_claim(stuck)))
            await eventually(lambda: slow.reads == 1, what="the slow store sends")
            assert await fetcher.fetch(fetcher.read_claim(header)) == CONTENT
            assert not waiting.done()
            slow.held.set()


async def test_directory_that_hangs_delays_no_other_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network mount may hang its readers for as long as its server is away."""
    hung, sound = tmp_path / "hung", tmp_path / "sound"
    for directory in (hung, sound):
        directory.mkdir()
        (directory / "a").write_bytes(CONTENT)
    stuck = (hung / "a").stat().st_ino
    server_is_back = threading.Event()
    read = os.read

    def read_from_mount(file: int, length: int) -> bytes:
        if os.fstat(file).st_ino == stuck:
            server_is_back.wait()
        return read(file, length)

    monkeypatch.setattr(os, "read", read_from_mount)
    settings = ClaimSettings(allowed=(f"file://{hung}", f"file://{sound}"), timeout_ms=1000)
    headers = {
        each: write_claim(describe_claim(f"file://{each}/a", CONTENT)) for each in (hung, sound)
    }
    async with ClaimFetcher(settings, QUICK) as fetcher:
        try:
            claims = [fetcher.read_claim(headers[hung])] * 50
            outcomes = await asyncio.gather(*map(fetcher.fetch, claims), return_exceptions=True)
            assert {type(each) for each in outcomes} == {ClaimUnavailable}
            assert await fetcher.fetch(fetcher.read_claim(headers[sound])) == CONTENT
            assert await asyncio.to_thread(lambda: "free") == "free"
        finally:
            server_is_back.set()
        assert await fetcher.fetch(claims[0]) == CONTENT


async def test_object_store_that_falls_silent_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the time for silence, and not after the time that the library has for all bytes."""
    async with StandInStore() as store:
        use_s3(monkeypatch, store)
        store.objects["/bucket/a"] = CONTENT
        header = write_claim(describe_claim("s3://bucket/a", CONTENT))
        store.holds = True
        settings = ClaimSettings(allowed=("s3://bucket",))
        impatient = replace(QUICK, read_timeout_s=0.1)
        async with ClaimFetcher(settings, impatient) as fetcher, asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(fetcher.fetch(fetcher.read_claim(header)))
            await eventually(lambda: len(store.requests) > 1, what="it is asked again")
            store.held.set()
            assert await fetching == CONTENT


async def test_empty_object_is_fetched() -> None:
    """Its claim says 0 bytes."""
    async with StandInStore() as store:
        assert await fetched(store.put("/a", b""), store.url) == b""
