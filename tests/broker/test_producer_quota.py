"""Exactly once behind a producer quota, on a real Kafka: slow, and not for ever the same step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from headrace.protocol.codec import encode_request
from headrace.tools.local_kafka import LocalKafka
from tests.broker.test_exactly_once import FUSED, ExactlyOnceHarness
from tests.support.models import add_version, identity
from tests.support.processes import Process, create_topics
from tests.support.quotas import limit_producers

ANSWERS = 60
FLOATS = 50_000
BYTES_PER_S = 500_000


@pytest.fixture
async def bench(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> AsyncIterator[ExactlyOnceHarness]:
    """Answers of 200 kB, of which all together take six times the timeout of a transaction."""
    add_version(tmp_path, "wide", 1, identity("FP32", ("batch", FLOATS)))
    bench = ExactlyOnceHarness(kafka.bootstrap_servers, unique_name, tmp_path)
    x = np.ones((1, FLOATS), np.float32)
    bench.partitions = 1
    bench.value = encode_request("application/msgpack", "wide", {"x": x})
    bench.settings |= {
        "HEADRACE_KAFKA__CLIENT_ID": unique_name,
        "HEADRACE_KAFKA__TRANSACTION_TIMEOUT_MS": "4000",
        "HEADRACE_TOPICS__PARTITIONS": "1",
    }
    await create_topics(bench.settings)
    await limit_producers(kafka.bootstrap_servers, unique_name, BYTES_PER_S)
    yield bench
    await limit_producers(kafka.bootstrap_servers, unique_name, None)


@pytest.mark.timeout(240)
async def test_backlog_under_producer_quota_is_answered_once(bench: ExactlyOnceHarness) -> None:
    """A transaction of all that has ended times out: smaller ones do not."""
    await bench.send(ANSWERS)
    async with bench.reading(), Process(FUSED[0], bench.settings):
        await bench.all_seen(deadline_s=150.0)

    assert bench.seen == bench.each_once()
