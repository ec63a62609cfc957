"""`headrace topics` without a broker."""

from __future__ import annotations

import json

from headrace.cli.outcome import Exit
from tests.support.command_line import Call


def test_topics_create_with_embedded_log_does_nothing(call: Call) -> None:
    """Without a broker there is nothing to create, and that is said."""
    result = call("topics", "create")
    assert (result.exit_code, result.stdout) == (Exit.DONE, "")
    assert "the embedded log has its topics already" in result.stderr


def test_topics_check_passes_with_embedded_log(call: Call) -> None:
    """The embedded log's topics are as they should be."""
    result = call("topics", "check")
    assert (result.exit_code, result.stderr) == (Exit.DONE, "")


def test_topics_check_prints_faults_as_json(call: Call) -> None:
    """With `--json` the faults are a list, empty when there is none."""
    assert json.loads(call("topics", "check", "--json").stdout) == []


def test_topics_describe_prints_json(call: Call) -> None:
    """The description of each topic names its partitions, message, writers and readers."""
    described = json.loads(call("topics", "describe", "--json").stdout)
    items = next(topic for topic in described if topic["topic"] == "headrace.items")
    assert (items["partitions"], items["message"]) == (4, "ItemRecord or ItemChunkRecord")
    assert (items["writers"], items["readers"]) == (["ingest"], ["batcher"])


def test_topics_describe_prints_table(call: Call) -> None:
    """The text names each topic, who writes it and who reads it."""
    assert (
        "headrace.requests: 4 partitions\n  outside -> ingest" in call("topics", "describe").stdout
    )
