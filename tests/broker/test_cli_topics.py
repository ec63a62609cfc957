"""`headrace topics` and `headrace doctor` against a real broker."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from headrace.cli.outcome import Exit
from headrace.tools.local_kafka import LocalKafka
from tests.support.broker import SCRAM_PASSWORD, SCRAM_USER
from tests.support.command_line import Call

WRONG_PASSWORD = "battery7staple"


@pytest.fixture
def config(tmp_path: Path, kafka: LocalKafka, unique_name: str) -> Path:
    """Settings for the shared broker, in a namespace of this test's own."""
    (tmp_path / "models").mkdir()
    return write_config(tmp_path, unique_name, bootstrap_servers=kafka.bootstrap_servers)


@pytest.fixture
def secure_config(tmp_path: Path, kafka_scram_tls: LocalKafka, unique_name: str) -> Path:
    """Settings for the shared broker with TLS and SCRAM, with the right password."""
    (tmp_path / "models").mkdir()
    return write_config(
        tmp_path,
        unique_name,
        bootstrap_servers=kafka_scram_tls.bootstrap_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username=SCRAM_USER,
        sasl_password=SCRAM_PASSWORD,
        ssl_ca_file=str(kafka_scram_tls.ca_file),
    )


def write_config(directory: Path, namespace: str, **kafka: str) -> Path:
    path = directory / "test.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in kafka.items()]
    path.write_text(
        "\n".join([f'namespace = "{namespace}"', "[topics]", "partitions = 3", "[kafka]", *lines])
    )
    return path


def test_created_topics_pass_check(call: Call, config: Path, unique_name: str) -> None:
    """`create` makes all topics as they should be, and `check` agrees."""
    created = call("--config", str(config), "topics", "create", "--json")
    assert created.exit_code == Exit.DONE
    assert json.loads(created.stdout)[f"{unique_name}.requests"] is True
    checked = call("--config", str(config), "topics", "check")
    assert (checked.exit_code, checked.stderr) == (Exit.DONE, "")


def test_create_leaves_topics_that_exist(call: Call, config: Path, unique_name: str) -> None:
    """A second `create` changes nothing and says so."""
    call("--config", str(config), "topics", "create")
    again = call("--config", str(config), "topics", "create")
    assert again.exit_code == Exit.DONE
    assert f"{unique_name}.items: existed" in again.stdout.splitlines()


def test_missing_topics_fail_check(call: Call, config: Path, unique_name: str) -> None:
    """Before `create` the check ends with 1 and names each missing topic and the fix."""
    checked = call("--config", str(config), "topics", "check")
    assert checked.exit_code == Exit.FAILED
    assert (
        f"error: {unique_name}.requests: does not exist; run `headrace topics create`"
        in checked.stderr.splitlines()
    )


def test_services_do_not_start_without_topics(call: Call, config: Path, unique_name: str) -> None:
    """`headrace run` refuses with exit code 2 and the reason, within its first seconds."""
    result = call("--config", str(config), "run", "ingest")
    assert result.exit_code == Exit.USAGE
    assert f"headrace: {unique_name}.items: does not exist" in result.stderr


def test_unequal_partitions_fail_check(call: Call, config: Path, unique_name: str) -> None:
    """Items with other partitions than requests are an error; `create` follows requests."""
    call("--config", str(config), "topics", "create")
    text = config.read_text()
    # Now `items` is the topic of another namespace, which has four partitions.
    other = config.with_name("other.toml")
    other.write_text(
        text.replace(unique_name, f"{unique_name}-4").replace("partitions = 3", "partitions = 4")
    )
    call("--config", str(other), "topics", "create")
    config.write_text(f'{text}\n[topics.names]\nitems = "{unique_name}-4.items"\n')
    checked = call("--config", str(config), "topics", "check")
    assert checked.exit_code == Exit.FAILED
    assert f"expected the 3 partitions of {unique_name}.requests, got 4" in checked.stderr


def test_create_follows_existing_requests_topic(call: Call, config: Path, unique_name: str) -> None:
    """New items and results get the partitions that requests has, not those of the settings."""
    text = config.read_text()
    config.write_text(f'{text}\n[topics.names]\nitems = "{unique_name}.first-items"\n')
    call("--config", str(config), "topics", "create")
    config.write_text(text.replace("partitions = 3", "partitions = 5"))
    call("--config", str(config), "topics", "create")
    described = json.loads(call("--config", str(config), "topics", "describe", "--json").stdout)
    counts = {topic["topic"]: topic["partitions"] for topic in described}
    assert counts[f"{unique_name}.items"] == 3


def test_create_refuses_existing_topic_that_differs_from_new_requests(
    call: Call, config: Path, unique_name: str
) -> None:
    """An `items` that was there before `requests` is an error at once, as for `check`."""
    text = config.read_text()
    call("--config", str(config), "topics", "create")
    config.write_text(
        f'{text}\n[topics.names]\nrequests = "{unique_name}.new"\n'.replace(
            "partitions = 3", "partitions = 4"
        )
    )
    created = call("--config", str(config), "topics", "create")
    assert created.exit_code == Exit.FAILED
    assert (
        f"error: {unique_name}.items: expected the 4 partitions of {unique_name}.new, got 3"
        in created.stderr
    )


def test_description_has_settings_of_broker(call: Call, config: Path, unique_name: str) -> None:
    """`describe` shows what the broker says of each topic."""
    call("--config", str(config), "topics", "create")
    described = json.loads(call("--config", str(config), "topics", "describe", "--json").stdout)
    items = next(topic for topic in described if topic["topic"] == f"{unique_name}.items")
    assert items["partitions"] == 3
    assert items["config"]["retention.ms"] == "86400000"
    assert items["config"]["segment.ms"] == "10800000"


def test_doctor_reports_nothing_on_created_topics(call: Call, config: Path) -> None:
    """With broker and topics in place the doctor tells the broker's age and ends with 0."""
    call("--config", str(config), "topics", "create")
    result = call("--config", str(config), "doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == Exit.DONE
    assert findings["broker"]["text"].endswith("answers: Kafka 4.0 or newer")
    assert findings["topics"]["text"] == "all 8 are as they should be"


def test_doctor_reports_missing_topics(call: Call, config: Path, unique_name: str) -> None:
    """Each missing topic is a line with its fix."""
    result = call("--config", str(config), "doctor")
    assert result.exit_code == Exit.FAILED
    assert (
        f"error   topics        {unique_name}.requests: does not exist "
        "-> run `headrace topics create`" in result.stdout.splitlines()
    )


async def test_doctor_reports_transaction_left_open(
    call: Call, config: Path, kafka: LocalKafka, unique_name: str
) -> None:
    """One of two minutes is a warning with its partition and first offset; a new one is none."""
    topic = f"{unique_name}.requests"
    await asyncio.to_thread(call, "--config", str(config), "topics", "create")
    async with (
        AIOKafkaProducer(
            bootstrap_servers=kafka.bootstrap_servers, transactional_id=unique_name
        ) as producer,
        producer.transaction(),
    ):
        now_ms = int(time.time() * 1000)
        await producer.send_and_wait(topic, b"v", partition=1, timestamp_ms=now_ms - 120_000)
        await producer.send_and_wait(topic, b"v", partition=2, timestamp_ms=now_ms)
        result = await asyncio.to_thread(call, "--config", str(config), "doctor")
    (line,) = (line for line in result.stdout.splitlines() if "was begun" in line)
    assert result.exit_code == Exit.DONE
    assert line.startswith(f"warning topics        {topic}/1: a transaction that was begun 12")
    assert "is open and hides the offsets from 0 on -> " in line


def test_right_password_is_accepted(call: Call, secure_config: Path) -> None:
    """Over TLS and SCRAM the topics are created and the doctor is content."""
    assert call("--config", str(secure_config), "topics", "create").exit_code == Exit.DONE
    result = call("--config", str(secure_config), "doctor")
    assert result.exit_code == Exit.DONE
    assert SCRAM_PASSWORD not in result.output


def test_wrong_password_is_one_line_without_secret(call: Call, secure_config: Path) -> None:
    """A refused password is told in one line that names the user and shows no secret."""
    secure_config.write_text(secure_config.read_text().replace(SCRAM_PASSWORD, WRONG_PASSWORD))
    result = call("--config", str(secure_config), "topics", "check")
    assert result.exit_code == Exit.FAILED
    (line,) = result.stderr.splitlines()
    assert f"user '{SCRAM_USER}' or its password (SCRAM-SHA-512) refused" in line
    assert WRONG_PASSWORD not in result.output


def test_doctor_reports_wrong_password(call: Call, secure_config: Path) -> None:
    """The doctor names the settings to look at, and shows no secret."""
    secure_config.write_text(secure_config.read_text().replace(SCRAM_PASSWORD, WRONG_PASSWORD))
    result = call("--config", str(secure_config), "doctor")
    (line,) = (line for line in result.stdout.splitlines() if line.split()[1] == "broker")
    assert result.exit_code == Exit.FAILED
    assert line.startswith("error ")
    assert line.endswith("-> check kafka.security_protocol, kafka.sasl_* and kafka.ssl_*")
    assert WRONG_PASSWORD not in result.output


def test_absent_broker_is_reported_with_address(call: Call, tmp_path: Path) -> None:
    """The line names the address at which no broker listens."""
    path = write_config(tmp_path, "nobody", bootstrap_servers="127.0.0.1:1")
    result = call("--config", str(path), "topics", "check")
    assert result.exit_code == Exit.FAILED
    (line,) = result.stderr.splitlines()
    assert "127.0.0.1:1" in line
