"""The adapter's error for a release of aiokafka that lacks a private name."""

from __future__ import annotations

import pytest
from aiokafka.client import AIOKafkaClient

from headrace.log.kafka._aiokafka import PRIVATE_NAMES, WRITTEN_FOR, check_names


def test_pinned_aiokafka_has_every_private_name() -> None:
    """Names count that stand in the code of methods: attributes of objects are set there."""
    check_names(PRIVATE_NAMES, WRITTEN_FOR)


def test_aiokafka_without_private_name_is_refused_by_name() -> None:
    """The error names the attribute, the file and both releases."""
    with pytest.raises(
        ImportError,
        match=r"aiokafka 0\.99 has no AIOKafkaClient\._gone, which "
        r"headrace/log/kafka/_aiokafka\.py uses; Headrace was written for 0\.14\.0",
    ):
        check_names({AIOKafkaClient: ("_conns", "_gone")}, "0.99")
